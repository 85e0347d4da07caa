"""Where what learns is computed: in the stage's own process, or on several ranks beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from rlcore.config.bounds import NonNegativeInt, PositiveFloat, PositiveInt
from rlcore.config.rl import RlConfig
from rlcore.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class PlacementConfig:
    """``local``: one process. ``processes``: ``learner_ranks`` processes of this machine that take each step together.

    ``shard``: ``full``, each rank holds a part of every weight (FSDP2); ``replicate``, each holds all of them; ``auto``
    is ``replicate`` for adapters, else ``full``. ``narrow``: shards are gathered in the precision that products are
    computed in, at half the traffic; norms and embeddings are then in it too.

    ``devices``: GPUs of the ranks, indices among those that this process sees; empty: the first ones. A call that takes
    longer than ``deadline_minutes`` ends the ranks, and ranks that were lost are started again, at most
    ``max_restarts`` times in a run.
    """

    backend: Literal["local", "processes"] = "local"
    learner_ranks: PositiveInt = 1
    shard: Literal["auto", "full", "replicate"] = "auto"
    narrow: bool = False
    devices: tuple[NonNegativeInt, ...] = ()
    deadline_minutes: PositiveFloat = 60.0
    max_restarts: NonNegativeInt = 3

    def __post_init__(self) -> None:
        of_ranks = (self.learner_ranks > 1, self.shard != "auto", self.narrow, self.devices)
        if self.backend == "local" and any(of_ranks):
            raise ConfigError("learner_ranks, shard, narrow and devices are of ranks: set backend = 'processes'")
        if self.shard == "replicate" and self.narrow:
            raise ConfigError("narrow is of shards, shard = 'replicate' has none")
        if self.devices and len(self.devices) != self.learner_ranks:
            raise ConfigError(
                f"devices names {len(self.devices)} GPUs, {self.learner_ranks} ranks need {self.learner_ranks}"
            )

    def is_sharded(self, *, adapted: bool) -> bool:
        """Whether each rank holds but a part of the weights that learn; an adapter's base is whole everywhere."""
        return self.learner_ranks > 1 and self.shard != "replicate" and not adapted

    @property
    def numbers(self) -> Mapping[str, object]:
        """What changes the numbers that come out, in their last digits, for the key of a stage."""
        if self.learner_ranks == 1:
            return {}
        return {"learner_ranks": self.learner_ranks, "shard": self.shard, "narrow": self.narrow}


def placement_faults(placement: PlacementConfig, stages: Mapping[str, RlConfig]) -> list[str]:
    """Why stages, by name, cannot learn where they are placed, with the key of each fault."""
    if placement.learner_ranks == 1:
        return []
    faults = []
    for name, settings in stages.items():
        update, shard = settings.update, placement.shard
        if update.adapter.rank and (shard == "full" or placement.narrow):
            faults.append(
                f"placement: stages.{name}.update.adapter.rank > 0: an adapter's base is whole on every rank; set "
                "placement.shard = 'auto', and not narrow"
            )
        if update.optim.kind == "adamw_8bit" and shard != "replicate" and not update.adapter.rank:
            faults.append(
                f"stages.{name}.update.optim.kind = 'adamw_8bit': shards have moments in float32; set it to 'adamw', "
                "or placement.shard = 'replicate'"
            )
    return faults
