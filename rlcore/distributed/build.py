"""Construction of policy, reference policy and critic of an RL run, from a plan that any process can receive."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn
from transformers import PreTrainedModel

from rlcore.algorithms.table import resolve_algorithm
from rlcore.config import RlConfig
from rlcore.hardware.sharded import Ranks, ShardConfig, attach_ranks, shard
from rlcore.models.heads import ScalarHeadModel
from rlcore.models.logprob_check import check_model
from rlcore.models.lora import AdaptedModel, add_lora, load_adapter
from rlcore.models.runtime import Runtime
from rlcore.text.tokenization import ChatTokenizer
from rlcore.training.learner import Learner
from rlcore.training.local_learner import LocalLearner

Policy: TypeAlias = PreTrainedModel | AdaptedModel


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerPlan:
    """Models and settings of a learner.

    Attributes:
        critic_start: Checkpoint of the critic's backbone or LoRA: ``start``, unless it begins as a reward model.
        reference: Checkpoint of the reference policy, or None for ``start``.
    """

    start: Path
    critic_start: Path
    config: RlConfig
    seed: int
    reference: Path | None = None

    @property
    def is_adapted(self) -> bool:
        """True if a LoRA is trained, on a base that every rank holds completely."""
        return self.config.update.lora.rank > 0


def make_policy(plan: LearnerPlan, runtime: Runtime) -> Policy:
    """Load the starting checkpoint for training, or frozen with a LoRA.

    Raises:
        ModelError: It cannot be trained.
    """
    lora, engine = plan.config.update.lora, plan.config.sampling.engine
    as_vllm = engine is not None and engine.kind != "native"
    model = runtime.load_base(plan.start, as_vllm=as_vllm) if lora.rank else runtime.load_trainable(plan.start)
    check_model(model, ChatTokenizer.load(plan.start))
    return add_lora(model, lora, "policy", seed=plan.seed) if lora.rank else model


def make_learner(
    plan: LearnerPlan, policy: Policy, runtime: Runtime, *, beside: Iterable[nn.Module] = ()
) -> LocalLearner:
    """Create a learner in this process. ``beside``: other models in its memory, which it measures too.

    Raises:
        ModelError: The critic must start from a reward model that is no LoRA of the same base.
    """
    critic, reference = _critic_and_reference(plan, policy, runtime)
    return LocalLearner(_learner(plan, policy, critic), reference, other_models=beside)


def make_rank_learner(
    plan: LearnerPlan, ranks: Ranks, runtime: Runtime, *, sharding: ShardConfig | None
) -> LocalLearner:
    """Create the learner of one rank: with shards, or without ``sharding`` with all weights.

    Models to be sharded are loaded into CPU memory first.
    """
    first = replace(runtime, device=torch.device("cpu")) if sharding else runtime
    policy = make_policy(plan, first)
    critic, reference = _critic_and_reference(plan, policy, first)
    is_shared = critic is not None and critic.backbone is policy
    roots: list[Any] = [critic if is_shared else policy, None if is_shared else critic]
    if not isinstance(reference, AdaptedModel):
        roots.append(reference)
    shard_models([each for each in roots if each is not None], ranks, sharding, device=runtime.device)
    return LocalLearner(_learner(plan, policy, critic), reference)


def shard_models(
    models: Iterable[nn.Module], ranks: Ranks, sharding: ShardConfig | None, *, device: torch.device
) -> None:
    """Replace each model's weights by this rank's shards on ``device``, or keep all weights without ``sharding``."""
    for model in models:
        if sharding:
            shard(model, ranks, sharding, device=device)
        else:
            attach_ranks(model, ranks)


def _learner(plan: LearnerPlan, policy: Policy, critic: ScalarHeadModel | None) -> Learner:
    return Learner(policy, critic, algorithm=resolve_algorithm(plan.config), config=plan.config)


def _critic_and_reference(
    plan: LearnerPlan, policy: Policy, runtime: Runtime
) -> tuple[ScalarHeadModel | None, Policy | None]:
    critic = _critic(plan, policy, runtime) if resolve_algorithm(plan.config).uses_critic else None
    if plan.config.kl.coefficient == 0.0:
        return critic, None
    if plan.reference is not None and plan.reference.absolute() != plan.start.absolute():
        return critic, runtime.load_reference(plan.reference)
    # The reference policy of a LoRA is the base with every LoRA disabled.
    is_adapted = isinstance(policy, AdaptedModel)
    return critic, AdaptedModel(policy.base, "") if is_adapted else runtime.load_reference(plan.start)


def _critic(plan: LearnerPlan, policy: Policy, runtime: Runtime) -> ScalarHeadModel:
    critic = plan.config.critic
    if critic.architecture == "shared":
        return ScalarHeadModel.on_backbone(policy)
    if critic.architecture == "separate":
        return ScalarHeadModel.on_backbone(runtime.load_trainable(plan.critic_start))
    if critic.init_from != "policy":
        return ScalarHeadModel.on_backbone(load_adapter(policy, plan.critic_start, "critic"))
    return ScalarHeadModel.on_backbone(add_lora(policy, plan.config.update.lora, "critic", seed=plan.seed))
