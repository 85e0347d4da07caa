"""Faults of numbers that control a run: KL coefficients, early stops, minibatches, seeds, references, evaluations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.faults.engine import drawing
from benchmarks.faults.lab import (
    AGENT,
    EVALUATED,
    NUM_ITERATIONS,
    REPLACES,
    STOPS,
    Inject,
    Patches,
    Play,
    components_of,
    played,
    replaced,
)
from benchmarks.faults.tensors import ADAPTER
from rlcore.agents import session
from rlcore.algorithms.kl import PenaltyController
from rlcore.loop import rollouts as rollouts_module
from rlcore.loop import update as update_module
from rlcore.loop.prefetch import RolloutPrefetcher
from rlcore.loop.prompt_schedule import PromptSchedule
from rlcore.models import lora
from rlcore.rewards.math_answer import MathReward
from rlcore.rewards.mix import WeightedReward
from rlcore.sampling import native
from rlcore.sampling.native import NativeSampler
from rlcore.training import experience, learner, losses
from rlcore.training.losses import StepLosses
from rlcore.training.update_stats import StatAccumulator
from rlcore.types import Score

ADAPTS, IN_REWARD, PENALTY = "grpo, the KL adapts", "grpo, the KL in the reward adapts", "ppo_penalty"


def kl_sums(change: Callable[[torch.Tensor, int], torch.Tensor], name: str) -> Inject:
    """Change a sum of the loss's KL, given the number of tokens."""

    def policy_loss(old: Any, *given: Any) -> Any:
        made = old(*given)
        sums = {key: change(value, int(made.num_tokens)) if key == name else value for key, value in made.sums.items()}
        return dataclasses.replace(made, sums=sums)

    return replaced(losses, "policy_loss", policy_loss)


def mean_of_tokens(old: Any, *given: Any, **more: Any) -> Any:
    """Measure the KL of an episode as a mean over its tokens."""
    made = old(*given, **more)
    return dataclasses.replace(made, mean_kl=made.mean_kl * made.num_episodes / sum(map(_count, made.samples)))


def _count(sample: Any) -> int:
    return int(sample.loss_mask.sum())


def references_moved(old: Any, self: Any, iteration: int) -> Any:
    """Give each prompt of an iteration the reference answer of the next one."""
    found = old(self, iteration)
    return [dataclasses.replace(a, reference=b.reference) for a, b in zip(found, [*found[1:], found[0]], strict=True)]


def graded_with_others(old: Any, self: Any, rollouts: Any) -> Any:
    """Grade each completion against the reference answer of the next prompt, and keep it so."""
    count = len(rollouts)
    for place, rollout in enumerate(rollouts):
        other = rollouts[(place + 4) % count].prompt.reference
        object.__setattr__(rollout, "prompt", dataclasses.replace(rollout.prompt, reference=other))
    return old(self, rollouts)


def contains(old: Any, self: Any, rollouts: Any) -> list[Score]:
    """Accept a completion that contains the reference answer."""
    return [
        Score(value=value, terms={"math": value}) for value in (float(r.prompt.reference in r.text) for r in rollouts)
    ]


def same_seed(old: Any, seed: int, *purpose: Any) -> int:
    """Derive the seed of rollouts without the iteration."""
    return int(old(seed, *purpose[:1])) if purpose[0] == "rollouts" else int(old(seed, *purpose))


def first_order(old: Any, samples: Any, count: int, *, seed: int, epoch: int) -> Any:
    """Use the minibatches of the first epoch in all epochs."""
    return old(samples, count, seed=seed, epoch=0)


def half_known(old: Any, *given: Any, **more: Any) -> Any:
    """Drop wrong answers from the accuracy if they are in the second half."""
    correct = given[0]
    half = len(correct) // 2
    return old([*correct[:half], *(True for _ in correct[half:])], **more)


def sampled_evaluation(old: Any, self: Any, prompts: Any, params: Any, **more: Any) -> Any:
    """Evaluate with sampled tokens."""
    return old(self, prompts, dataclasses.replace(params, greedy=False), **more)


def overlapping(patch: Patches) -> Any:
    """Evaluate on prompts that are trained on."""

    def make() -> Any:
        components = components_of(EVALUATED)
        held_out = dataclasses.replace(
            components.held_out, prompts=[*components.held_out.prompts, components.prompts[3]]
        )  # type: ignore[type-var, union-attr]
        return dataclasses.replace(components, held_out=held_out)

    return played(make)


def other_alpha(old: Any, config: Any, targets: Any) -> Any:
    """Make adapters at the scale of rank-stabilised LoRA."""
    made = old(config, targets)
    made.use_rslora = True
    return made


CONTROLS: dict[str, tuple[str, Inject]] = {
    "the KL coefficient follows the KL per token": (
        ADAPTS,
        replaced(update_module, "mean_kl", lambda old, made, metrics: metrics.get("kl/ref", 0.0)),
    ),
    "the KL coefficient follows the KL in the reward per token": (
        IN_REWARD,
        replaced(update_module, "build_experience", mean_of_tokens),
    ),
    "the KL of the loss is summed twice": (ADAPTS, kl_sums(lambda value, count: 2.0 * value, "kl/ref")),
    "the penalty follows the KL per completion": (
        PENALTY,
        replaced(StepLosses, "kl_from_old", lambda old, *given, **more: 12.0 * old(*given, **more)),
    ),
    "the penalty follows the KL before the update": (
        PENALTY,
        replaced(StepLosses, "kl_from_old", lambda old, *given, **more: 0.0),
    ),
    "the penalty is halved and never doubled": (
        PENALTY,
        replaced(PenaltyController, "updated", lambda old, self, kl: old(self, min(kl, self.target))),
    ),
    "an update stops after its first epoch": (
        STOPS,
        replaced(StatAccumulator, "exceeded_kl", lambda old, *given: True),
    ),
    "an update never stops early": (STOPS, replaced(StatAccumulator, "exceeded_kl", lambda old, *given: False)),
    "an update stops by the KL since its first epoch": (
        STOPS,
        replaced(StatAccumulator, "epoch_mean", lambda old, self, name: self.means().get(name, 0.0)),
    ),
    "an update stops by the KL per completion": (STOPS, kl_sums(lambda value, count: 12.0 * value, "kl/old")),
    "an update stops by the KL to the reference, which is the old policy's": (
        "grpo, stops at the reference",
        replaced(StatAccumulator, "epoch_ref_kl", lambda old, self: self.epoch_mean("kl/old")),
    ),
    "an update has one epoch": (
        "grpo, 2 epochs",
        replaced(StatAccumulator, "exceeded_kl", lambda old, *given: True),
    ),
    "groups with a signal are replaced": (
        REPLACES,
        replaced(rollouts_module, "group_has_signal", lambda old, group, **more: not old(group, **more)),
    ),
    "groups without a signal stay": (
        REPLACES,
        replaced(rollouts_module, "group_has_signal", lambda old, group, **more: True),
    ),
    "groups with a mean below 0.5 are replaced": (
        REPLACES,
        replaced(
            rollouts_module,
            "group_has_signal",
            lambda old, group, **more: (
                old(group, **more) and sum(i.score.value or 0.0 for i in group) > 0.5 * len(group)
            ),
        ),
    ),
    "replacements come in the order of the file": (
        REPLACES,
        replaced(
            rollouts_module,
            "unused_prompts",
            lambda old, prompts, used, **more: [p for p in prompts if p.prompt_id not in used],
        ),
    ),
    "adapters have the scale of rank-stabilised LoRA": (ADAPTER, replaced(lora, "_peft_config", other_alpha)),
    "every epoch has the minibatches of the first": (
        "grpo, 2 epochs",
        replaced(learner, "split_by_group", first_order),
    ),
    "minibatches are shuffled without the seed": (
        "grpo, 2 epochs",
        replaced(
            learner,
            "split_by_group",
            lambda old, samples, count, *, seed, epoch: old(samples, count, seed=0, epoch=epoch),
        ),
    ),
    "an epoch has one minibatch": (
        "grpo, 2 epochs",
        replaced(learner, "split_by_group", lambda old, samples, count, **more: old(samples, 1, **more)),
    ),
    "every iteration has the seed of the first": ("grpo", replaced(rollouts_module, "derive_seed", same_seed)),
    "the engine draws from streams of another seed": (
        "grpo",
        replaced(native, "_uniforms", lambda old, block, num_tokens, *, seed: old(block, num_tokens, seed=seed + 1)),
    ),
    "rollouts are an update older than is set": (
        "grpo, one iteration ahead",
        replaced(
            RolloutPrefetcher,
            "get",
            lambda old, self, sample, iteration, *, until, prepare: old(
                self, sample, iteration, until=min(until + 1, NUM_ITERATIONS), prepare=prepare
            ),
        ),
    ),
    "references are those of the next prompt": ("grpo", replaced(PromptSchedule, "prompts_for", references_moved)),
    "completions keep the reference that they were graded with, another prompt's": (
        "grpo",
        replaced(WeightedReward, "__call__", graded_with_others),
    ),
    "the accuracy counts the second half as right": (EVALUATED, replaced(rollouts_module, "accuracy", half_known)),
    "the accuracy is that of the problems before": (
        EVALUATED,
        replaced(rollouts_module, "score_each", lambda old, *given: [*old(*given)[1:], old(*given)[0]]),
    ),
    "problems of an evaluation are partly right": (
        EVALUATED,
        replaced(rollouts_module, "is_correct", lambda old, score, limit: old(score, 0.0)),
    ),
    "an evaluation samples": (EVALUATED, replaced(NativeSampler, "sample", sampled_evaluation)),
    "an agent's calls are drawn at 0.8 of the temperature": (AGENT, drawing(lambda logits: logits / 0.8)),
    "an agent's calls have the same random numbers": (
        AGENT,
        replaced(session, "derive_seed", lambda old, *given: old(0)),
    ),
    "the verifier accepts answers that contain the reference": ("grpo", replaced(MathReward, "__call__", contains)),
    "the mean length is 1": (
        "grpo",
        replaced(experience, "_metrics", lambda old, *given, **more: old(*given, **more) | {"completion/length": 1.0}),
    ),
}

OVERLAP: dict[str, Play] = {"held-out prompts are trained on": overlapping}
