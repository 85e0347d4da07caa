"""Supervised fine-tuning on ranks: what each of them has, and all of them behind the handle of one learner."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rlcore.config import SftConfig, to_dict
from rlcore.config.placement import PlacementConfig
from rlcore.demonstrations import Demonstration
from rlcore.models.check import check_model
from rlcore.models.runtime import Runtime
from rlcore.models.sharded import Sharding, join, shard
from rlcore.ranks import Ranks
from rlcore.strict import build
from rlcore.tokenization import ChatTokenizer
from rlcore.training.rank_pool import RankPool, rank_setup
from rlcore.training.sft import SftLearner


@dataclass(frozen=True, kw_only=True, slots=True)
class SftPlan:
    """What demonstrations are taught to, by which settings. ``start``: the checkpoint that it begins with."""

    start: Path
    config: SftConfig
    seed: int

    def to_json(self) -> dict[str, Any]:
        """The plan as plain values, of which :meth:`from_json` makes it again."""
        return {"start": str(self.start.absolute()), "config": to_dict(self.config), "seed": self.seed}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> SftPlan:
        """The plan that :meth:`to_json` was asked of."""
        config = build(SftConfig, json.loads(json.dumps(values["config"])))
        return cls(start=Path(values["start"]), config=config, seed=values["seed"])


def make_sft_share(
    plan: SftPlan, ranks: Ranks, runtime: Runtime, *, sharding: Sharding | None, device: torch.device
) -> SftLearner:
    """What one of several ranks has on ``device``: shards, or without ``sharding`` all weights.

    Raises:
        ModelError: the checkpoint cannot be trained.
    """
    model = (replace(runtime, device=torch.device("cpu")) if sharding else runtime).load_trainable(plan.start)
    check_model(model, ChatTokenizer.load(plan.start))
    if sharding:
        shard(model, ranks, sharding, device=device)
    else:
        join(model, ranks)
    return SftLearner(model, plan.config)


class SftGroup:
    """A :class:`~rlcore.training.sft.SftHandle` on ranks; where one is lost, the stage has to be run again."""

    def __init__(self, plan: SftPlan, placement: PlacementConfig, runtime: Runtime, ranks: RankPool) -> None:
        """Start the ranks. ``runtime``: what each computes in.

        Raises:
            ModelError: the checkpoint cannot be trained.
            LearnerLostError: a rank did not start.
        """
        self._ranks, size = ranks, placement.learner_ranks
        setup = {"kind": "sft", "plan": plan.to_json(), "tokens": 0}
        setups = [setup | rank_setup(placement, runtime, rank, adapted=False) for rank in range(size)]
        try:
            ranks.start(setups)
        except BaseException:
            ranks.close()
            raise

    def step(self, minibatch: Sequence[Demonstration]) -> dict[str, float]:
        found: dict[str, float] = self._ranks.ask("step", minibatch)["result"]
        return found

    def mean_loss(self, demonstrations: Sequence[Demonstration]) -> float:
        found: float = self._ranks.ask("mean_loss", demonstrations)["result"]
        return found

    def save_model(self, start: Path, folder: Path, *, like_start: bool = False) -> None:
        self._ranks.ask("save_model", start.absolute(), folder.absolute(), like_start=like_start)

    def close(self) -> None:
        """End the ranks."""
        self._ranks.close()
