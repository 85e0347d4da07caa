"""Settings two and three at a time, from scored rollouts to the gradient, against plain loops over tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch

from rlcore.algorithms.advantages import STD_EPSILON
from rlcore.config import KlConfig, RolloutCorrectionConfig
from rlcore.models.heads import ScalarHeadModel
from rlcore.text.packing import TokenSequence
from rlcore.training.experience import build_experience
from rlcore.training.learner import Learner
from rlcore.training.scoring_models import ScoringModels
from rlcore.types import Rollout, ScoredRollout
from tests import strategies
from tests.learners import assert_same, gradients_of, make_learner, update_config
from tests.reference import iteration
from tests.reference.losses import one_at_a_time

BETA, CAP = 0.3, 1.3
BOUND = 1e-5  # old log-probabilities, values and advantages travel as float32
REFERENCE = strategies.tiny_llama(seed=9, dtype=torch.float64)
KLS = {"none": KlConfig(), "reward": KlConfig(coefficient=BETA, apply_to="reward"), "loss": KlConfig(coefficient=BETA)}
MISMATCHES = {"off": RolloutCorrectionConfig(mode="off"), "truncate": RolloutCorrectionConfig(high=CAP)}
SCORES = ((0.0, 1.0, None, 0.25), (1.0, 1.0, 1.0, 1.0))  # None: the grader failed; the second group is of one mind


def scored_groups(policy: Any) -> list[list[ScoredRollout]]:
    """Two groups with tool output and an engine that is off by up to 0.4; the second completion of each was cut."""
    groups = []
    for group, scores in zip(strategies.random_groups(policy, 3, num_prompts=2, group_size=4), SCORES, strict=True):
        items = []
        for number, (item, value) in enumerate(zip(group, scores, strict=True)):
            count = len(item.rollout.completion_ids)
            rollout = dataclasses.replace(
                item.rollout,
                finish_reason="length" if number == 1 else "stop",
                loss_mask=tuple(place != 1 or count < 3 for place in range(count)),
                sampler_logprobs=tuple(p - 0.4 * (place % 2) for place, p in enumerate(item.rollout.sampler_logprobs)),
            )
            items.append(ScoredRollout(rollout=rollout, score=dataclasses.replace(item.score, value=value)))
        groups.append(items)
    return groups


def completion(
    learner: Learner, rollout: Rollout, reward: float, group: int, *, corrected: bool, with_reference: bool
) -> iteration.Completion:
    """A rollout as the loops have it, from forward passes of its own."""
    sequence = TokenSequence(prompt_ids=rollout.prompt.token_ids, completion_ids=rollout.completion_ids)
    logprobs = one_at_a_time(learner.policy, sequence)
    refs = one_at_a_time(REFERENCE, sequence).tolist() if with_reference else logprobs.tolist()
    values = torch.zeros(len(logprobs), dtype=torch.float64)
    if learner.critic is not None:
        ids = torch.tensor([sequence.prompt_ids + sequence.completion_ids])
        states = learner.critic.backbone.base_model(ids).last_hidden_state[0]
        values = learner.critic.head(states)[len(sequence.prompt_ids) - 1 : -1, 0]
    tokens = [
        iteration.TokenOf(
            logprob=logprob,
            value=value,
            old_logprob=float(logprob.detach()),
            sampler_logprob=sampled if corrected else float(logprob.detach()),
            ref_logprob=ref,
            old_value=float(value.detach()),
            own=own,
        )
        for logprob, value, sampled, ref, own in zip(
            logprobs, values, rollout.sampler_logprobs, refs, rollout.loss_mask, strict=True
        )
    ]
    return iteration.Completion(tokens, reward, group)


def kept_completions(learner: Learner, truncated: str, kl: KlConfig, *, corrected: bool) -> list[iteration.Completion]:
    """Return the completions that are trained on with their rewards, as documented."""
    made = []
    for number, group in enumerate(scored_groups(learner.policy)):
        for item in group:
            cut = item.rollout.finish_reason == "length"
            if item.score.value is None or (cut and truncated == "mask"):
                continue
            reward = 0.0 if cut and truncated == "zero" else item.score.value
            settings = {"corrected": corrected, "with_reference": kl.coefficient > 0.0}
            made.append(completion(learner, item.rollout, reward, number, **settings))
    return made


def with_kl_paid(batch: Sequence[iteration.Completion]) -> list[iteration.Completion]:
    """Each reward less beta times the summed log-ratio of the policy's own tokens."""
    gaps = [sum(t.old_logprob - t.ref_logprob for t in one.tokens if t.own) for one in batch]
    return [one._replace(reward=one.reward - BETA * gap) for one, gap in zip(batch, gaps, strict=True)]


def gradient_of_ours(learner: Learner, truncated: str) -> torch.Tensor:
    """Return the gradient in the optimizers after experience and update."""
    kl = learner.config.kl
    judges = ScoringModels(
        policy=learner.policy,
        reference=REFERENCE if kl.coefficient > 0.0 else None,
        critic=learner.critic,
        temperature=1.0,
        tokens_per_microbatch=40,
    )
    experience = build_experience(
        scored_groups(learner.policy),
        learner.algorithm,
        judges,
        kl=kl,
        kl_coefficient=kl.coefficient,
        truncated=truncated,
        need_old_logprobs=learner.needs_old_logprobs,
    )
    return gradients_of(learner, experience.samples)


def gradient_of_loops(losses: Sequence[tuple[torch.Tensor, torch.nn.Module]]) -> torch.Tensor:
    """Return the gradient of each loss by its model, flat, in the optimizers' order: matrices before vectors."""
    parts = []
    for loss, module in losses:
        learning = sorted(module.parameters(), key=lambda parameter: parameter.ndim < 2)
        parts += [gradient.flatten() for gradient in torch.autograd.grad(loss, learning)]
    return torch.cat(parts)


@pytest.mark.parametrize(
    ("placement", "truncated", "mismatch"), list(product(KLS, ("score", "zero", "mask"), MISMATCHES))
)
def test_grpo_with_kl_truncation_and_mismatch_together(placement: str, truncated: str, mismatch: str) -> None:
    kl = KLS[placement]
    update: Any = update_config(
        rollout_correction=MISMATCHES[mismatch], truncated_completions=truncated, tokens_per_microbatch=40
    )
    learner = make_learner("grpo", kl=kl, update=update)
    batch = kept_completions(learner, truncated, kl, corrected=mismatch == "truncate")
    in_loss = BETA if placement == "loss" else 0.0
    paid = with_kl_paid(batch) if placement == "reward" else batch
    loss = iteration.grpo(paid, beta=in_loss, clip=0.2, cap=CAP, epsilon=STD_EPSILON)
    expected = gradient_of_loops([(loss, learner.policy)])  # before the update moves the weights
    assert_same(gradient_of_ours(learner, truncated), expected, BOUND)


@pytest.mark.parametrize(("placement", "truncated"), list(product(("none", "reward"), ("score", "zero", "mask"))))
def test_ppo_with_kl_and_truncation_together(placement: str, truncated: str) -> None:
    kl = KLS[placement]
    update: Any = update_config(truncated_completions=truncated, tokens_per_microbatch=40)
    learner = make_learner("ppo", kl=kl, update=update)
    assert isinstance(learner.critic, ScalarHeadModel)
    batch = kept_completions(learner, truncated, kl, corrected=False)
    losses = iteration.ppo(batch, beta=kl.coefficient, gamma=1.0, lam=0.95, clip=0.2, value_clip=0.2)
    expected = gradient_of_loops([(losses[0], learner.policy), (losses[1], learner.critic)])
    assert_same(gradient_of_ours(learner, truncated), expected, BOUND)
