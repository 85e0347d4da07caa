"""The held-out accuracy on the curve of an RL run is what the stage ``evaluate`` would say."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from rlcore.loop import HeldOut
from rlcore.loop.prompt_schedule import PromptSchedule
from rlcore.loop.rollouts import evaluate_held_out
from rlcore.metrics import check_names
from rlcore.rewards.base import failed_score, scored
from rlcore.sampling.base import SamplingParams
from rlcore.tasks.kinds.evaluate.step import Grader, answers, log_line, summarise
from rlcore.tasks.kinds.rl.step import seed_after
from rlcore.tasks.presets.settings import EvaluationConfig
from rlcore.types import FailedRollout, Prompt, Rollout, Score
from tests import strategies


def test_an_rl_stage_that_builds_on_another_draws_prompts_in_another_order_and_the_first_as_ever() -> None:
    template = strategies.scored_rollout(0.0).rollout.prompt
    prompts = [dataclasses.replace(template, prompt_id=str(number)) for number in range(50)]
    orders = [
        [prompt.prompt_id for prompt in PromptSchedule(prompts, 50, seed=seed_after(3, earlier)).prompts_for(1)]
        for earlier in range(3)
    ]
    assert orders[0] == [prompt.prompt_id for prompt in PromptSchedule(prompts, 50, seed=3).prompts_for(1)]
    assert len(set(map(tuple, orders))) == 3
    assert [sorted(order) for order in orders] == [sorted(orders[0])] * 3


class HalfDeadEngine:
    """Answers a prompt with its own name; produces nothing for those named ``failed``."""

    def sample(
        self, prompts: Sequence[Prompt], params: SamplingParams, *, seed: int
    ) -> list[list[Rollout | FailedRollout]]:
        return [[self._answer(prompt)] for prompt in prompts]

    def _answer(self, prompt: Prompt) -> Rollout | FailedRollout:
        if prompt.task == "failed":
            return FailedRollout(prompt=prompt, reason="the engine died")
        rollout = strategies.scored_rollout(0.0).rollout
        return dataclasses.replace(rollout, prompt=prompt, text=prompt.task)


def grade(rollouts: Sequence[Rollout]) -> list[Score]:
    """Right, wrong, or not judged, as the text says."""
    return [
        failed_score("timeout") if r.text == "unjudged" else scored("math", float(r.text == "right")) for r in rollouts
    ]


@pytest.mark.parametrize(
    ("kinds", "accuracy", "failed"),
    [
        (("right", "wrong", "right", "right"), 0.75, 0),
        (("failed", "right", "failed", "right"), 0.5, 2),  # the answers stay with their prompts
        (("right", "unjudged", "failed", "wrong"), 0.25, 2),
        (("failed", "failed"), 0.0, 2),
    ],
)
def test_the_monitor_counts_what_failed_as_wrong_and_says_so_just_as_the_evaluation_does(
    kinds: tuple[str, ...], accuracy: float, failed: int
) -> None:
    template = strategies.scored_rollout(0.0).rollout.prompt
    prompts = [
        dataclasses.replace(template, prompt_id=str(number), task=kind, reference="7")
        for number, kind in enumerate(kinds)
    ]
    said: list[str] = []
    held_out = HeldOut(prompts=prompts, verifier=grade)  # type: ignore[arg-type]
    engine: Any = HalfDeadEngine()
    figures = evaluate_held_out(engine, held_out, max_new_tokens=8, log=said.append)
    check_names(figures)
    assert (figures["eval/accuracy"], figures["eval/failed"]) == (accuracy, failed)
    assert ["counted as wrong" in text for text in said] == [True] * bool(failed)
    params = SamplingParams(temperature=1.0, max_new_tokens=8, num_samples=1, greedy=True)
    config = EvaluationConfig(num_problems=4, max_new_tokens=8)
    table = answers(engine, prompts, params, Grader(config, grade), seed=0)  # type: ignore[arg-type]
    summary = summarise(table, config, seed=0)
    assert {name: summary[name] for name in figures} == figures


def test_accuracy_is_of_the_problems_with_a_reference_and_is_not_told_where_none_has_one() -> None:
    template = strategies.scored_rollout(0.0).rollout.prompt
    engine: Any = HalfDeadEngine()
    params = SamplingParams(temperature=1.0, max_new_tokens=8, num_samples=1, greedy=True)
    config = EvaluationConfig(num_problems=4, max_new_tokens=8)

    def evaluated(*references: str) -> dict[str, float]:
        kinds = zip(("right", "wrong", "right", "wrong"), references, strict=True)
        prompts = [
            dataclasses.replace(template, prompt_id=str(number), task=kind, reference=reference)
            for number, (kind, reference) in enumerate(kinds)
        ]
        graded = Grader(config, grade)  # type: ignore[arg-type]
        return summarise(answers(engine, prompts, params, graded, seed=0), config, seed=0)

    some = evaluated("7", "7", "", " ")
    check_names(some)
    assert (some["eval/accuracy"], some["eval/problems"], some["eval/no_reference"]) == (0.5, 2, 2)
    assert log_line(some, 0.95).endswith(" n=2 no_reference=2")
    none = evaluated("", "", "", "")
    assert not [name for name in none if "accuracy" in name or "pass" in name]
    assert (none["eval/problems"], none["eval/no_reference"], none["eval/failed"]) == (0, 4, 0)
    assert log_line(none, 0.95) == "no_reference=4"
