"""An evaluation's accuracy is recomputed from its answers, and a few answers are graded and scored again."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from rlcore.checks.audit.evaluation_checks import accuracy_errors
from rlcore.evaluation.intervals import accuracy
from rlcore.loop import HeldOut
from rlcore.types import FailedRollout, Prompt, Score
from tests import strategies

PROMPTS = [
    Prompt(prompt_id=f"p{n}", messages=(), token_ids=(n,), reference=str(n), task="t", dataset="ab"[n % 2])
    for n in range(8)
]
VALUES: list[float | None] = [1.0, 0.0, 0.6, 1.0, None, 0.5, float("nan"), 1.0]
HELD_OUT = HeldOut(prompts=PROMPTS, verifier=None, correct_from={"b": 0.5})  # type: ignore[arg-type]


def errors(*, groups: Any = None, values: Any = VALUES, **changes: float) -> list[str]:
    made = [[dataclasses.replace(strategies.scored_rollout(0.0).rollout, prompt=each)] for each in PROMPTS]
    made[4] = [FailedRollout(prompt=PROMPTS[4], reason="no room")]  # type: ignore[list-item]
    scores = [Score(value=value, terms={}, error="" if value is not None else "failed") for value in values]
    interval = accuracy([1, 0, 0, 1, 0, 1, 0, 1])
    metrics = {
        "eval/accuracy": 0.5,
        "eval/accuracy_low": interval.low,
        "eval/accuracy_high": interval.high,
        "eval/failed": 1.0,
        "eval/data/a": 0.25,
        "eval/data/b": 0.75,
    }
    return [str(each) for each in accuracy_errors(HELD_OUT, groups or made, scores, metrics | changes)]


def test_metrics_that_are_those_of_the_answers_are_left_alone() -> None:
    assert errors() == []


@pytest.mark.parametrize("name", ["accuracy", "accuracy_low", "accuracy_high", "failed", "data/a", "data/b"])
def test_every_number_of_an_evaluation_is_recomputed(name: str) -> None:
    (error,) = errors(**{f"eval/{name}": 0.9})
    assert error.startswith(f"eval/{name} by 4 right answers of 8: expected ")
    assert error.endswith("found 0.9")


def test_answers_of_other_problems_are_named() -> None:
    made = [[dataclasses.replace(strategies.scored_rollout(0.0).rollout, prompt=each)] for each in PROMPTS]
    (error,) = errors(groups=[made[1], made[0], *made[2:]])
    assert error == "a held-out problem: expected 'p0' with reference '0', found 'p1' with reference '1'"
