"""Distributed SFT, DPO and reward models: the learner of one rank, and a client with a local learner's interface."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from rlcore.config import DpoConfig, RewardModelConfig, SftConfig, to_dict
from rlcore.config.distributed import DistributedConfig
from rlcore.distributed.build import shard_models
from rlcore.distributed.rank_pool import RankPool, rank_setup
from rlcore.hardware.ranks import Ranks
from rlcore.hardware.sharded import ShardConfig
from rlcore.models.logprob_check import check_model
from rlcore.models.runtime import Runtime
from rlcore.strict_config import build
from rlcore.text.demonstrations import Demonstration
from rlcore.text.packing import TokenSequence
from rlcore.text.tokenization import ChatTokenizer
from rlcore.training.audit.shuffle_gap import ShuffleGap
from rlcore.training.dpo import DpoLearner, dpo_policy
from rlcore.training.preferences import PreferenceSet
from rlcore.training.reward_learner import RewardLearner, reward_backbone, reward_members
from rlcore.training.sft import SftLearner

if TYPE_CHECKING:
    from jaxtyping import Float, Float64

Supervised: TypeAlias = SftLearner | DpoLearner | RewardLearner
_CONFIGS = (SftConfig, DpoConfig, RewardModelConfig)


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

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain values for :meth:`from_json`."""
        kind = type(self.config).__name__
        return {"start": str(self.start.absolute()), kind: to_dict(self.config), "seed": self.seed}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> SupervisedPlan:
        """Restore a plan of :meth:`to_json`."""
        (kind,) = (each for each in _CONFIGS if each.__name__ in values)
        config: Any = build(kind, json.loads(json.dumps(values[kind.__name__])))
        return cls(start=Path(values["start"]), config=config, seed=values["seed"])


def make_rank_supervised(
    plan: SupervisedPlan, ranks: Ranks, runtime: Runtime, *, sharding: ShardConfig | None, device: torch.device
) -> Supervised:
    """Create the learner of one rank on ``device``: with shards, or without ``sharding`` with all weights.

    Raises:
        ModelError: The checkpoint cannot be trained.
    """
    first = replace(runtime, device=torch.device("cpu")) if sharding else runtime
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


class _DistributedSupervised:
    """A learner on ranks; if one is lost, the stage must be rerun."""

    def __init__(self, plan: SupervisedPlan, distributed: DistributedConfig, runtime: Runtime, ranks: RankPool) -> None:
        """Start the ranks. ``runtime``: device and precision of each.

        Raises:
            ModelError: The checkpoint cannot be trained.
            LearnerLostError: A rank did not start.
        """
        self._ranks = ranks
        own = {"kind": "supervised", "plan": plan.to_json()}
        setups = [
            own | rank_setup(distributed, runtime, rank, adapted=plan.is_adapted)
            for rank in range(distributed.learner_ranks)
        ]
        try:
            ranks.start(setups)
        except BaseException:
            ranks.close()
            raise

    def close(self) -> None:
        """End the ranks."""
        self._ranks.close()

    def _ask(self, method: str, *arguments: Any, **settings: Any) -> Any:
        return self._ranks.ask(method, *arguments, **settings)["result"]


class DistributedSft(_DistributedSupervised):
    """A :class:`~rlcore.training.sft.SftHandle` on ranks."""

    def step(self, minibatch: Sequence[Demonstration]) -> dict[str, float]:
        return dict(self._ask("step", minibatch))

    def mean_loss(self, demonstrations: Sequence[Demonstration]) -> float:
        return float(self._ask("mean_loss", demonstrations))

    def shuffle_gap(self, demonstrations: Sequence[Demonstration], *, seed: int) -> ShuffleGap:
        found: ShuffleGap = self._ask("shuffle_gap", demonstrations, seed=seed)
        return found

    def save_model(self, start: Path, folder: Path, *, like_start: bool = False) -> None:
        self._ask("save_model", start.absolute(), folder.absolute(), like_start=like_start)


class DistributedDpo(_DistributedSupervised):
    """A :class:`~rlcore.training.dpo.DpoHandle` on ranks."""

    def begin(self, sequences: Sequence[TokenSequence], *, num_steps: int) -> None:
        self._ask("begin", sequences, num_steps=num_steps)

    def step(self, sets: Sequence[PreferenceSet]) -> dict[str, float]:
        return dict(self._ask("step", sets))

    def rewards(self, sequences: Sequence[TokenSequence]) -> Float64[Tensor, "sequences"]:
        found: Tensor = self._ask("rewards", sequences)
        return found

    def save_model(self, start: Path, folder: Path, *, like_start: bool = False) -> None:
        self._ask("save_model", start.absolute(), folder.absolute(), like_start=like_start)


class DistributedReward(_DistributedSupervised):
    """A :class:`~rlcore.training.reward_learner.RewardHandle` on ranks."""

    def features(self, sequences: Sequence[TokenSequence]) -> Float64[Tensor, "sequences features"]:
        found: Tensor = self._ask("features", sequences)
        return found

    def states(self, sequences: Sequence[TokenSequence]) -> Float[Tensor, "sequences hidden"]:
        found: Tensor = self._ask("states", sequences)
        return found

    def set_heads(self, heads: Float[Tensor, "members hidden"]) -> None:
        self._ask("set_heads", heads)

    def begin(self, member: int, *, num_steps: int) -> None:
        self._ask("begin", member, num_steps=num_steps)

    def step(self, sets: Sequence[PreferenceSet]) -> dict[str, float]:
        return dict(self._ask("step", sets))

    def scores(self, sequences: Sequence[TokenSequence]) -> Float[Tensor, "members sequences"]:
        found: Tensor = self._ask("scores", sequences)
        return found

    def probe(self, sequences: Sequence[TokenSequence]) -> None:
        self._ask("probe", sequences)

    def save_model(self, start: Path, folder: Path) -> None:
        self._ask("save_model", start.absolute(), folder.absolute())
