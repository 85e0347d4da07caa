"""The glossary: complete and unambiguous."""

from __future__ import annotations

import dataclasses
import runpy

import pytest

from rlcore.errors import NonFiniteError, TrainingError
from rlcore.metrics import METRICS, SECTIONS, check_names, find_metric, render


def test_no_metric_is_explained_twice() -> None:
    names = [metric.name for metrics in SECTIONS.values() for metric in metrics]
    assert len(names) == len(set(names)) == len(METRICS)


def test_every_field_is_documented() -> None:
    assert [name for name, metric in METRICS.items() if not all(dataclasses.asdict(metric).values())] == []


@pytest.mark.filterwarnings("ignore:.*found in sys.modules.*:RuntimeWarning")
def test_the_command_prints_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_module("rlcore.metrics", run_name="__main__")
    assert capsys.readouterr().out == render()


def test_every_row_of_the_page_has_six_cells() -> None:
    rows = [line for line in render().splitlines() if line.startswith("| `")]
    assert len(rows) == len(METRICS)
    assert {row.replace("\\|", "").count("|") for row in rows} == {7}


@pytest.mark.parametrize(
    ("logged", "entry"),
    [
        ("reward/mean", "reward/mean"), ("reward/term/math", "reward/term/<name>"),
        ("eval/pass_at_8", "eval/pass_at_<k>"), ("eval/pass_at_8_low", "eval/pass_at_<k>"), ("reward/term/", None),
        ("reward/term/a/b", None), ("reward/term", None), ("xreward/term/math", None),
    ],
)  # fmt: skip
def test_a_logged_name_is_found_under_its_entry(logged: str, entry: str | None) -> None:
    found = find_metric(logged)
    assert (found.name if found else None) == entry


def test_known_finite_metrics_pass() -> None:
    check_names({"reward/mean": 0.5, "reward/term/math": 1.0, "kl/ref": 0.0})


def test_an_unknown_name_is_refused_with_the_closest_one() -> None:
    with pytest.raises(TrainingError, match=r"(?s)unknown metrics: reward/meen.*did you mean reward/mean"):
        check_names({"reward/meen": 0.5})
    with pytest.raises(TrainingError, match="add it to the glossary"):
        check_names({"zzz": 0.5})


def test_what_is_not_finite_is_reported_by_name() -> None:
    with pytest.raises(NonFiniteError, match=r"kl/ref = nan, loss/policy = -inf"):
        check_names({"reward/mean": 0.5, "kl/ref": float("nan"), "loss/policy": float("-inf")})
