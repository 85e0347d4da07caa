"""Policy, reference and critic of an RL run, from what can be said of them in any process."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn
from transformers import PreTrainedModel

from rlcore.algorithms.resolve import resolve_algorithm
from rlcore.config import RlConfig, to_dict
from rlcore.distributed.ranks import Ranks
from rlcore.distributed.sharded import ShardConfig, attach_ranks, shard
from rlcore.hardware.runtime import Runtime
from rlcore.models.heads import ScalarHeadModel
from rlcore.models.logprob_check import check_model
from rlcore.models.lora import AdaptedModel, add_lora, load_adapter
from rlcore.strict import build
from rlcore.text.tokenization import ChatTokenizer
from rlcore.training.learner import Learner
from rlcore.training.local_learner import LocalLearner

Policy: TypeAlias = PreTrainedModel | AdaptedModel


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerPlan:
    """What learns, by which settings. ``start``: the policy's checkpoint; ``critic_start``: that of the critic's trunk
    or adapter, ``start`` again unless it begins as a reward model; ``reference``: what KL is measured to, left out:
    ``start``."""

    start: Path
    critic_start: Path
    config: RlConfig
    seed: int
    reference: Path | None = None

    def to_json(self) -> dict[str, Any]:
        """The plan as plain values, of which :meth:`from_json` makes it again."""
        paths = {"start": self.start, "critic_start": self.critic_start, "reference": self.reference}
        named = {name: None if path is None else str(path.absolute()) for name, path in paths.items()}
        return {**named, "config": to_dict(self.config), "seed": self.seed}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> LearnerPlan:
        """The plan that :meth:`to_json` was asked of."""
        return cls(
            start=Path(values["start"]),
            critic_start=Path(values["critic_start"]),
            reference=None if values["reference"] is None else Path(values["reference"]),
            config=build(RlConfig, json.loads(json.dumps(values["config"]))),
            seed=values["seed"],
        )


def make_policy(plan: LearnerPlan, runtime: Runtime) -> Policy:
    """All of the starting checkpoint's weights, or an adapter on it, frozen.

    Raises:
        ModelError: it cannot be trained.
    """
    adapter = plan.config.update.lora
    model = runtime.load_base(plan.start) if adapter.rank else runtime.load_trainable(plan.start)
    check_model(model, ChatTokenizer.load(plan.start))
    return add_lora(model, adapter, "policy", seed=plan.seed) if adapter.rank else model


def make_learner(
    plan: LearnerPlan, policy: Policy, runtime: Runtime, *, beside: Iterable[nn.Module] = ()
) -> LocalLearner:
    """What learns in this process, on ``policy``; ``beside``: models that share its memory.

    Raises:
        ModelError: the critic is to start from a reward model that is no adapter of the same base.
    """
    critic, reference = _others(plan, policy, runtime)
    return LocalLearner(_learner(plan, policy, critic), reference, beside=beside)


def make_rank_learner(
    plan: LearnerPlan, ranks: Ranks, runtime: Runtime, *, sharding: ShardConfig | None, device: torch.device
) -> LocalLearner:
    """What one of several ranks has on ``device``: shards, or without ``sharding`` all weights.

    Models that are to be cut up are loaded in the machine's memory first.
    """
    first = replace(runtime, device=torch.device("cpu")) if sharding else runtime
    policy = make_policy(plan, first)
    critic, reference = _others(plan, policy, first)
    is_shared = critic is not None and critic.backbone is policy
    roots: list[Any] = [critic if is_shared else policy, None if is_shared else critic]
    if not isinstance(reference, AdaptedModel):
        roots.append(reference)
    shard_models([each for each in roots if each is not None], ranks, sharding, device=device)
    return LocalLearner(_learner(plan, policy, critic), reference)


def shard_models(
    models: Iterable[nn.Module], ranks: Ranks, sharding: ShardConfig | None, *, device: torch.device
) -> None:
    """Leave of each model this rank's shards on ``device``; without ``sharding`` each rank has all of it."""
    for model in models:
        if sharding:
            shard(model, ranks, sharding, device=device)
        else:
            attach_ranks(model, ranks)


def _learner(plan: LearnerPlan, policy: Policy, critic: ScalarHeadModel | None) -> Learner:
    return Learner(policy, critic, algorithm=resolve_algorithm(plan.config), config=plan.config)


def _others(plan: LearnerPlan, policy: Policy, runtime: Runtime) -> tuple[ScalarHeadModel | None, Policy | None]:
    """The critic and the reference, where the configuration needs them."""
    critic = _critic(plan, policy, runtime) if resolve_algorithm(plan.config).uses_critic else None
    if plan.config.kl.coefficient == 0.0:
        return critic, None
    if plan.reference is not None and plan.reference.absolute() != plan.start.absolute():
        return critic, runtime.load_reference(plan.reference)
    # Of an adapted policy the reference is the base with every adapter off.
    is_adapted = isinstance(policy, AdaptedModel)
    return critic, AdaptedModel(policy.base, "") if is_adapted else runtime.load_reference(plan.start)


def _critic(plan: LearnerPlan, policy: Policy, runtime: Runtime) -> ScalarHeadModel:
    """The critic where the configuration places it."""
    critic = plan.config.critic
    if critic.architecture == "shared":
        return ScalarHeadModel.on_trunk(policy)
    if critic.architecture == "separate":
        return ScalarHeadModel.on_trunk(runtime.load_trainable(plan.critic_start))
    if critic.init_from != "policy":
        return ScalarHeadModel.on_trunk(load_adapter(policy, plan.critic_start, "critic"))
    return ScalarHeadModel.on_trunk(add_lora(policy, plan.config.update.lora, "critic", seed=plan.seed))
