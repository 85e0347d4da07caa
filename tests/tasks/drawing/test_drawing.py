"""Drawings: charts, plots, and the kinds of artifacts that pages show."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree

import pytest

from rlcore.tasks.drawing import plots
from rlcore.tasks.drawing.charts import Point, Series, line_chart
from rlcore.tasks.drawing.levels import format_level
from rlcore.tasks.drawing.plots import head_to_head_table
from rlcore.tasks.drawing.result import of_kind
from rlcore.tasks.kinds.rl.page import points, summary_text


def test_each_kind_is_found_by_its_own_file_in_the_order_of_the_stages(tmp_path: Path) -> None:
    files = {
        "second": "health.json",
        "rm": "reliability.json",
        "kept": "rejection.json",
        "first": "health.json",
        "sft": "curve.json",
    }
    folders = {name: tmp_path / name for name in files}
    for name, file in files.items():
        folders[name].mkdir()
        (folders[name] / file).write_text("{}", encoding="utf-8")
    assert of_kind("rl", folders) == {"second": tmp_path / "second", "first": tmp_path / "first"}
    assert list(of_kind("reward_model", folders)) == ["rm"]
    assert list(of_kind("rejection", folders)) == ["kept"]


def drawn(*points: Point, title: str = "t") -> ElementTree.Element:
    return ElementTree.fromstring(line_chart([Series(label="a", colour=0, points=points)], title=title))


def ticks(root: ElementTree.Element) -> list[float]:
    texts = [text.text or "" for text in root.iter("text") if "text-anchor: end" in text.attrib["style"]]
    return [float(text.replace("−", "-")) for text in texts]


def dots(root: ElementTree.Element) -> list[ElementTree.Element]:
    return [use for use in root.iter("use") if use.find("title") is not None]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 1.0, [0.0, 0.25, 0.5, 0.75, 1.0]),
        (0.13, 0.42, [0.1, 0.2, 0.3, 0.4, 0.5]),  # 0.29 / 4 = 0.0725, the next round step is 0.1
        (3.0, 3.0, [0.0, 2.0, 4.0, 6.0]),  # a flat curve: from 0 to twice 3, in steps of 6 / 4 = 1.5, rounded to 2
        (0.0, 0.0, [0.0, 0.25, 0.5, 0.75, 1.0]),
        (-3.0, -3.0, [-6.0, -4.0, -2.0, 0.0]),
    ],
)
def test_ticks_are_round_and_enclose_the_values(low: float, high: float, expected: list[float]) -> None:
    assert ticks(drawn(Point(x=1, y=low), Point(x=2, y=high))) == pytest.approx(expected)


def test_a_chart_is_well_formed_and_shows_each_value_with_its_interval() -> None:
    points = [Point(x=1, y=0.5, low=0.4, high=0.6), Point(x=2, y=0.7, low=0.6, high=0.8)]
    text = line_chart([Series(label='<b>"&', colour=0, points=points)], title='a < "b"')
    root = ElementTree.fromstring(text)
    titles = [dot.findtext("title") for dot in dots(root)]
    assert titles == ['<b>"&, iteration 1: 0.5 [0.4, 0.6]', '<b>"&, iteration 2: 0.7 [0.6, 0.8]']
    assert root.attrib["aria-label"] == root.findtext("title") == 'a < "b"'
    assert text.count("fill-opacity: 0.16") == 1  # the band of the intervals


def test_a_higher_value_is_drawn_higher_and_a_later_one_further_right() -> None:
    first, last = dots(drawn(Point(x=1, y=0.0), Point(x=5, y=2.0)))
    assert float(first.attrib["x"]) < float(last.attrib["x"])
    assert float(first.attrib["y"]) > float(last.attrib["y"])


def test_colours_are_the_pages_and_nothing_comes_from_outside() -> None:
    series = [Series(label=f"{n}", colour=n, points=[Point(x=1, y=n), Point(x=2, y=n)]) for n in range(6)]
    text = line_chart(series, title="t")
    assert set(re.findall(r"var\(--(\w+)\)", text)) == {"c0", "c1", "c2", "c3", "c4", "c5", "line", "soft"}
    assert not re.findall(r"#0000|url\(|https?:|<style|xmlns| width=", text)


def test_the_same_points_give_the_same_bytes_and_two_charts_of_a_page_share_no_id() -> None:
    points = [Point(x=1, y=0.5), Point(x=2, y=0.7)]
    one, again, other = (
        line_chart([Series(label="a", colour=0, points=points)], title=title) for title in ("one", "one", "other")
    )
    assert one == again
    ids = [set(re.findall(r' id="([^"]+)"', text)) for text in (one, other)]
    assert all(ids) and not ids[0] & ids[1]


def test_without_a_point_there_is_no_chart_and_a_value_that_is_no_number_is_left_out() -> None:
    assert line_chart([], title="t") == line_chart([Series(label="a", colour=0, points=[])], title="t") == ""
    assert len(dots(drawn(Point(x=1, y=1.0), Point(x=2, y=math.nan), Point(x=3, y=2.0)))) == 2


def row(iteration: int, *, samples: int, seconds: float, accuracy: float | None = None) -> Mapping[str, float]:
    """An iteration that spent ``seconds`` in four equal parts, and 5 more on its evaluation, which is no cost of RL."""
    values = {"iteration": iteration, "rollouts/count": samples, "rollouts/tokens": 10 * samples, "reward/mean": 0.5}
    if iteration == 2:
        values["memory/total_bytes"] = 3 * 2**20
    values |= {f"seconds/{part}": seconds / 4 for part in ("rollout", "score", "update", "sync")}
    if accuracy is not None:
        values |= {"eval/accuracy": accuracy, "eval/accuracy_low": accuracy - 0.1, "eval/accuracy_high": accuracy + 0.1}
        values["seconds/evaluate"] = 5.0
    return values


# slow: 4 iterations of 100 samples and 10 s, evaluated at 2 and 4; fast: 4 of 80 samples and 4 s, evaluated at each
SLOW = [row(i, samples=100, seconds=10.0, accuracy={2: 0.3, 4: 0.6}.get(i)) for i in range(1, 5)]
FAST = [row(i, samples=80, seconds=4.0, accuracy=0.1 * i) for i in range(1, 5)]


def test_the_table_has_both_comparisons_by_costs_without_evaluation_and_names_a_run_alone() -> None:
    # FAST has 320 samples in all: SLOW's last evaluation within them is at 200. It ends after 16 s, and SLOW's first
    # evaluation comes after 20 s.
    table = head_to_head_table({"GRPO": SLOW, "PPO": FAST}, confidence=0.9)
    assert "| samples | GRPO | 2 | 200 | 2000 | 20.0 | 0.500 | 0.300 | [0.200, 0.400] | 3.0 |" in table
    assert "| samples | PPO | 4 | 320 | 3200 | 16.0 |" in table
    assert "| seconds | GRPO | – |" in table
    assert "| seconds | PPO | 4 | 320 | 3200 | 16.0 | 0.500 | 0.400 | [0.300, 0.500] | 3.0 |" in table
    assert "eval_every" in head_to_head_table({"GRPO": SLOW}, confidence=0.9)
    assert "eval_every" in head_to_head_table({"GRPO": SLOW, "PPO": []}, confidence=0.9)


@pytest.mark.parametrize(
    ("confidence", "text"), [(0.95, "95 %"), (0.9, "90 %"), (0.995, "99.5 %"), (0.99167, "99.17 %")]
)
def test_a_level_has_no_digit_more_than_it_needs(confidence: float, text: str) -> None:
    assert format_level(confidence) == text


def over_optimisation_row(iteration: int, *, paid: float, held_out: float, n: int, kl: float = 0.1) -> dict[str, float]:
    half = 1.96 * math.sqrt(held_out * (1 - held_out) / n)
    return {
        "iteration": iteration,
        "reward/mean": paid,
        "kl/ref": kl,
        "completion/length": 20.0,
        "eval/accuracy": held_out,
        "eval/accuracy_low": held_out - half,
        "eval/accuracy_high": held_out + half,
    }


def course(*held_out: float, n: int = 400, rise: float = 1.0) -> list[dict[str, float]]:
    return [
        over_optimisation_row(step, paid=rise * step, held_out=value, n=n, kl=0.05 * step)
        for step, value in enumerate(held_out, start=1)
    ]


def test_a_point_has_the_kl_of_a_whole_completion_and_the_mean_of_five_rewards() -> None:
    found = points(course(0.5, 0.6, 0.7, 0.7, 0.7, 0.7, 0.7))
    assert [point.iteration for point in found] == [1, 2, 3, 4, 5, 6, 7]
    assert found[1].kl == pytest.approx(2.0)
    assert found[1].distance == pytest.approx(math.sqrt(2.0))
    assert found[6].paid == pytest.approx((3 + 4 + 5 + 6 + 7) / 5)


def test_a_run_without_a_reference_or_without_evaluations_has_no_points() -> None:
    without_reference = [{k: v for k, v in each.items() if k != "kl/ref"} for each in course(0.5, 0.4)]
    without_evaluation = [{k: v for k, v in each.items() if not k.startswith("eval/")} for each in course(0.5, 0.4)]
    assert points(without_reference) == points(without_evaluation) == ()


def test_a_fall_beyond_chance_while_the_reward_rises_is_named_with_its_figures() -> None:
    text = summary_text(points(course(0.4, 0.8, 0.6, 0.3)), confidence=0.95)
    assert text.startswith("**Over-optimized**")
    assert "Held out: 0.800, 95 % interval [0.761, 0.839], at its best (iteration 2, KL 2.00" in text
    assert "0.300 [0.255, 0.345] at the end (KL 4.00). Paid: 1.500, then 2.500." in text


@pytest.mark.parametrize(
    "history",
    [
        pytest.param(course(0.4, 0.8, 0.78, 0.75), id="within chance"),
        pytest.param(course(0.4, 0.8, 0.6, 0.3, n=4), id="few problems"),
        pytest.param(course(0.4, 0.8, 0.6, 0.3, rise=-1.0), id="the reward falls too"),
        pytest.param(course(0.4, 0.8, 0.3, 0.8), id="it has come back"),
    ],
)
def test_another_course_is_not(history: list[dict[str, float]]) -> None:
    assert summary_text(points(history), confidence=0.95).startswith("No over-optimisation is seen.")


PNG = b"\x89PNG\r\n\x1a\n"
ROW = {
    "iteration": 1,
    "reward/mean": 0.5,
    "reward/std": 0.2,
    "eval/accuracy": 0.4,
    "eval/accuracy_low": 0.3,
    "eval/accuracy_high": 0.5,
    "completion/length": 9.0,
    "clip/fraction": 0.1,
    "entropy": 0.7,
    "gradient_norm": 1.0,
}


def test_curves_of_a_run_without_critic_and_reference_are_drawn_and_say_what_is_missing(tmp_path: Path) -> None:
    with_all = tmp_path / "all.png"
    without = tmp_path / "without.png"
    plots.training_curves(
        [ROW | {"kl/ref": 0.1, "value/explained_variance": 0.3}], with_all, title="ppo", confidence=0.95
    )
    plots.training_curves([ROW], without, title="grpo", confidence=0.95)
    assert with_all.read_bytes().startswith(PNG)
    assert without.read_bytes().startswith(PNG)
    assert with_all.read_bytes() != without.read_bytes()


def test_the_same_history_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one.png", "two.png"):
        plots.loss_curve([ROW], "reward/mean", tmp_path / name, title="same")
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "two.png").read_bytes()
