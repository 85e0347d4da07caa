"""What an online-RL run tells its adaptive KL coefficient, and its curve of held-out accuracy."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from rlcore.algorithms.table import ALGORITHMS
from rlcore.config import EvaluationConfig, KlConfig
from rlcore.metrics import check_names
from rlcore.rewards.base import graded, ungraded
from rlcore.sampling.base import SamplingParams
from rlcore.training.experience import Judges, build_experience
from rlcore.types import FailedRollout, Prompt, Rollout, Score
from tasks.steps.evaluate import answers, summarise
from tasks.steps.online_rl import mean_kl, monitor
from tests import strategies


@pytest.mark.parametrize("placement", ["reward", "loss"])
def test_the_adaptive_coefficient_sees_nats_per_completion_wherever_the_kl_stands(placement: Any) -> None:
    policy, reference = strategies.tiny_llama(), strategies.tiny_llama(seed=9)
    groups = strategies.random_groups(policy, 3)
    kl = KlConfig(coefficient=0.1, placement=placement)
    judges = Judges(policy=policy, reference=reference, critic=None, temperature=1.0, tokens_per_microbatch=64)
    experience = build_experience(
        groups, ALGORITHMS["grpo"], judges, kl=kl, kl_coefficient=0.1, truncated="score", need_old_logprobs=False
    )
    items = [item.rollout for group in groups for item in group]
    gaps = []
    for sample, rollout in zip(experience.samples, items, strict=True):
        old = rollout.sampler_logprobs  # the engine's are the policy's own here
        gaps.append([a - float(b) for a, b in zip(old, sample.ref_logprobs, strict=True)])
    if placement == "reward":
        expected = sum(map(sum, gaps)) / len(gaps)
        assert mean_kl(experience, {}) == pytest.approx(expected, rel=1e-4)
        return
    k3 = [math.exp(-gap) + gap - 1.0 for row in gaps for gap in row]
    per_token = sum(k3) / len(k3)
    assert mean_kl(experience, {"kl/ref": per_token}) == pytest.approx(sum(k3) / len(gaps), rel=1e-6)
    assert mean_kl(dataclasses.replace(experience), {}) == 0.0


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
    return [ungraded("timeout") if r.text == "unjudged" else graded("math", float(r.text == "right")) for r in rollouts]


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
    prompts = [dataclasses.replace(template, prompt_id=str(number), task=kind) for number, kind in enumerate(kinds)]
    said: list[str] = []
    config = EvaluationConfig(num_problems=4, max_new_tokens=8)
    run: Any = SimpleNamespace(
        rl=SimpleNamespace(sampling=SimpleNamespace(max_new_tokens=8)),
        sampler=HalfDeadEngine(),
        monitor_prompts=prompts,
        verifier=grade,
        context=SimpleNamespace(config=SimpleNamespace(evaluation=config), progress=said.append),
    )
    figures = monitor(run)
    check_names(figures)
    assert (figures["eval/accuracy"], figures["eval/failed"]) == (accuracy, failed)
    assert ["count as wrong" in text for text in said] == [True] * bool(failed)
    params = SamplingParams(temperature=1.0, max_new_tokens=8, num_samples=1, greedy=True)
    table = answers(run.sampler, prompts, params, grade, seed=0)  # type: ignore[arg-type]
    summary = summarise(table, config, seed=0)
    assert {name: summary[name] for name in figures} == figures
