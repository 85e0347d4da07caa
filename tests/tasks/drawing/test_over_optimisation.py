"""Over-optimisation: a reward that rises while the held-out figure falls beyond chance is named, and nothing else."""

from __future__ import annotations

import math

import pytest

from rlcore.tasks.drawing.over_optimisation import points, summary_text


def row(iteration: int, *, paid: float, held_out: float, n: int, kl: float = 0.1) -> dict[str, float]:
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
        row(step, paid=rise * step, held_out=value, n=n, kl=0.05 * step) for step, value in enumerate(held_out, start=1)
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
