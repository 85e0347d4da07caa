"""rlcore's PPO: iterations with a reward model, a KL penalty to a reference policy, and a critic of either kind."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch

from benchmarks.peers.ours import OPTIM, iterate, watched
from benchmarks.peers.record import Record
from benchmarks.peers.work import KL, VALUE_LOSS, Work
from rlcore.algorithms.resolve import resolve_algorithm
from rlcore.config import CriticConfig, KlConfig, RlConfig, SamplingConfig, UpdateConfig
from rlcore.hardware.precision import cast_linears
from rlcore.models.heads import ScalarHeadModel, score_rewards
from rlcore.rewards.user_function import function_reward
from rlcore.training.experience import token_sequences
from rlcore.training.learner import Learner
from rlcore.training.local_learner import LocalLearner


def ppo(work: Work, record: Record, microbatch: int, option: str) -> None:
    """Train with a critic that has a backbone of its own: four models."""
    _run(work, record, microbatch, "separate")


def ppo_shared(work: Work, record: Record, microbatch: int, option: str) -> None:
    """Train with a critic that is a head on the policy's backbone: three models."""
    _run(work, record, microbatch, "shared")


def _run(work: Work, record: Record, microbatch: int, architecture: Literal["separate", "shared"]) -> None:
    policy = watched(work, record)
    record.follow(policy)
    reference, judge = (cast_linears(watched(work, record), work.compute_dtype).requires_grad_(False) for _ in range(2))
    reward_model = _with_head(work, judge)

    def scores(rollouts: Any) -> list[float]:
        found = score_rewards(reward_model, token_sequences(rollouts), tokens_per_microbatch=microbatch)
        return found.tolist()

    config = RlConfig(
        algorithm="ppo",
        num_iterations=work.steps,
        prompts_per_iteration=work.num_prompts,
        group_size=work.group_size,
        learning_rate=work.learning_rate,
        sampling=SamplingConfig(max_new_tokens=work.max_new_tokens),
        update=UpdateConfig(tokens_per_microbatch=microbatch, optim=replace(OPTIM, max_grad_norm=1e9)),
        kl=KlConfig(coefficient=KL, apply_to="reward"),
        critic=CriticConfig(
            architecture=architecture, coefficient=VALUE_LOSS, learning_rate=work.learning_rate, lam=1.0
        ),
    )
    critic = _with_head(work, policy if architecture == "shared" else watched(work, record))
    learner = Learner(policy, critic, algorithm=resolve_algorithm(config), config=config)
    iterate(work, record, LocalLearner(learner, reference, other_models=(judge,)), function_reward(scores))


def _with_head(work: Work, backbone: Any) -> ScalarHeadModel:
    """Add the head of transformers' classifier."""
    model = ScalarHeadModel.on_backbone(backbone)
    with torch.no_grad():
        model.head.weight.copy_(work.make_classifier().score.weight)
    return model
