"""Construction of a learner of SFT, DPO or a reward model, from a plan that any process can receive."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import torch

from rlcore.config import DpoConfig, RewardModelConfig, SftConfig
from rlcore.distributed.build import shard_models
from rlcore.hardware.sharded import Ranks, ShardConfig
from rlcore.models.logprob_check import check_model
from rlcore.models.runtime import Runtime
from rlcore.text.tokenization import ChatTokenizer
from rlcore.training.dpo import DpoLearner, dpo_policy
from rlcore.training.reward_model import RewardLearner, reward_backbone, reward_members
from rlcore.training.sft import SftLearner

Supervised: TypeAlias = SftLearner | DpoLearner | RewardLearner

_METHODS: Mapping[type, tuple[str, ...]] = {
    SftConfig: ("step", "mean_loss", "shuffle_gap", "save_model"),
    DpoConfig: ("begin", "step", "rewards", "save_model"),
    RewardModelConfig: ("features", "states", "set_heads", "begin", "step", "scores", "probe", "save_model"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SupervisedPlan:
    """Checkpoint and settings of a supervised learner."""

    start: Path
    config: SftConfig | DpoConfig | RewardModelConfig
    seed: int

    @property
    def is_adapted(self) -> bool:
        """True if a LoRA is trained, on a base that every rank holds completely."""
        if isinstance(self.config, DpoConfig):
            return self.config.lora.rank > 0
        return isinstance(self.config, RewardModelConfig) and self.config.backbone.lora.rank > 0

    @property
    def methods(self) -> tuple[str, ...]:
        """Methods of the learner that ranks answer."""
        return _METHODS[type(self.config)]


def make_rank_supervised(
    plan: SupervisedPlan, ranks: Ranks, runtime: Runtime, *, sharding: ShardConfig | None
) -> Supervised:
    """Create the learner of one rank: with shards, or without ``sharding`` with all weights.

    Raises:
        ModelError: The checkpoint cannot be trained.
    """
    device, first = runtime.device, replace(runtime, device=torch.device("cpu")) if sharding else runtime
    if isinstance(plan.config, SftConfig):
        model = first.load_trainable(plan.start)
        check_model(model, ChatTokenizer.load(plan.start))
        shard_models([model], ranks, sharding, device=device)
        return SftLearner(model, plan.config)
    if isinstance(plan.config, DpoConfig):
        policy = dpo_policy(plan.start, plan.config, first, seed=plan.seed)
        shard_models([policy], ranks, sharding, device=device)
        return DpoLearner(policy, plan.config)
    backbone = reward_backbone(plan.start, plan.config.backbone, first, seed=plan.seed)
    members = reward_members(backbone, plan.config, seed=plan.seed)
    roots = {id(member.backbone): member for member in reversed(members)}  # heads on one backbone: the first has it
    shard_models(roots.values(), ranks, sharding, device=device)
    for member in members[1:]:
        if member.backbone is backbone:  # only a head
            member.head.to(device)
    return RewardLearner(members, plan.config)
