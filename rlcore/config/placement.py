"""Where a run computes: in the stage's own process, on several ranks beside it, or on a cluster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from rlcore.config.bounds import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from rlcore.config.engine import EngineConfig
from rlcore.config.rl import RlConfig
from rlcore.config.training import DpoConfig, OptimConfig, RewardModelConfig, SftConfig
from rlcore.errors import ConfigError

Learning: TypeAlias = RlConfig | SftConfig | DpoConfig | RewardModelConfig


@dataclass(frozen=True, kw_only=True)
class RayConfig:
    """Which processes of a run are on a Ray cluster beside the learner's ranks, and which cluster that is.

    ``address``: of a cluster that runs; empty: what ``RAY_ADDRESS`` names, else one is started on this machine for the
    run. ``num_rollout_workers``: processes with the built-in engine, among which prompts are dealt;
    ``num_reward_workers``: processes that compute rewards, reward models and sandboxes among them; 0: the run's own
    process does it. Each process on the cluster has ``cpus`` processors, and where the run computes on GPUs each rank
    and sampler has one of its own. ``reward_worker_gpus``: of each scorer; a part of one shares it.
    """

    address: str = ""
    num_rollout_workers: NonNegativeInt = 0
    num_reward_workers: NonNegativeInt = 0
    cpus: PositiveInt = 1
    reward_worker_gpus: NonNegativeFloat = 0.0


@dataclass(frozen=True, kw_only=True)
class PlacementConfig:
    """``local``: one process. ``processes``: ``learner_ranks`` processes of this machine that take each step together.
    ``ray``: they, samplers and scorers are processes of a Ray cluster, which may be many machines.

    ``shard``: ``full``, each rank holds a part of every weight (FSDP2); ``replicate``, each holds all of them; ``auto``
    is ``replicate`` for adapters, else ``full``. ``gather_in_compute_dtype``: shards are gathered in the precision that
    products are computed in, at half the traffic; norms and embeddings are then in it too. ``cpu_offload``: shards,
    gradients and moments rest in the machine's memory, those of a single rank too; a GPU holds what a layer needs, and
    processors take the step.

    ``tensor_parallel``: so many neighbouring ranks split the matrices of every layer among them, and take one share of
    the samples together; it divides ``learner_ranks``.

    ``devices``: GPUs of the ranks, indices among those that this process sees; empty: the first ones. A call that takes
    longer than ``timeout_minutes`` ends the ranks, and ranks that were lost are started again, at most
    ``max_restarts`` times in a run; so is each sampler and each scorer of a cluster.
    """

    backend: Literal["local", "processes", "ray"] = "local"
    learner_ranks: PositiveInt = 1
    shard: Literal["auto", "full", "replicate"] = "auto"
    gather_in_compute_dtype: bool = False
    cpu_offload: bool = False
    tensor_parallel: PositiveInt = 1
    devices: tuple[NonNegativeInt, ...] = ()
    timeout_minutes: PositiveFloat = 60.0
    max_restarts: NonNegativeInt = 3
    ray: RayConfig = field(default_factory=RayConfig)

    def __post_init__(self) -> None:
        of_ranks = (
            self.learner_ranks > 1,
            self.shard != "auto",
            self.gather_in_compute_dtype,
            self.cpu_offload,
            self.devices,
        )
        if self.learner_ranks % self.tensor_parallel:
            raise ConfigError(
                f"learner_ranks = {self.learner_ranks} is no multiple of tensor_parallel = {self.tensor_parallel}"
            )
        if self.shard == "replicate" and self.tensor_parallel > 1:
            raise ConfigError("tensor_parallel is of shards, shard = 'replicate' has none")
        if self.backend == "local" and any(of_ranks):
            raise ConfigError(
                "learner_ranks, shard, gather_in_compute_dtype, cpu_offload and devices are of ranks: set backend = "
                "'processes' or 'ray'"
            )
        if self.backend != "ray" and self.ray != RayConfig():
            raise ConfigError(
                f"ray.* is of a cluster: set backend = 'ray', or leave it out; backend is {self.backend!r}"
            )
        if self.backend == "ray" and self.devices:
            raise ConfigError("devices names GPUs of this machine; with backend = 'ray' Ray chooses them: leave it out")
        if self.shard == "replicate" and self.gather_in_compute_dtype:
            raise ConfigError("gather_in_compute_dtype is of shards, shard = 'replicate' has none")
        if self.shard == "replicate" and self.cpu_offload:
            raise ConfigError("cpu_offload is of shards, shard = 'replicate' has none")
        if self.devices and len(self.devices) != self.learner_ranks:
            raise ConfigError(
                f"devices names {len(self.devices)} GPUs, {self.learner_ranks} ranks need {self.learner_ranks}"
            )

    def is_sharded(self, *, adapted: bool) -> bool:
        """Whether each rank holds but a part of the weights that learn; an adapter's base is whole everywhere."""
        return self.is_shared and self.shard != "replicate" and not adapted

    @property
    def is_shared(self) -> bool:
        """Whether what learns is on ranks, and not as a whole in one process."""
        return self.learner_ranks > 1 or self.cpu_offload

    @property
    def numbers(self) -> Mapping[str, object]:
        """What changes the numbers that come out, in their last digits, for the key of a stage."""
        if not self.is_shared:
            return {}
        own: dict[str, object] = {
            "learner_ranks": self.learner_ranks,
            "shard": self.shard,
            "gather_in_compute_dtype": self.gather_in_compute_dtype,
        }
        own |= {"cpu_offload": True} if self.cpu_offload else {}
        return own | ({"tensor_parallel": self.tensor_parallel} if self.tensor_parallel > 1 else {})


def placement_errors(placement: PlacementConfig, stages: Mapping[str, Learning], engine: EngineConfig) -> list[str]:
    """Why stages, by name, cannot run where they are placed, with the key of each error; ``engine``: the preset's."""
    return [
        error
        for name, settings in stages.items()
        for error in (*_of_ranks(placement, name, settings), *_of_ray(placement, name, settings, engine))
    ]


def _of_ranks(placement: PlacementConfig, name: str, settings: Learning) -> Iterator[str]:
    if not placement.is_shared:
        return
    path, adapter, optim = _learned(settings)
    if adapter and (
        placement.shard == "full"
        or placement.gather_in_compute_dtype
        or placement.cpu_offload
        or placement.tensor_parallel > 1
    ):
        yield (
            f"distributed: stages.{name}.{adapter} > 0: an adapter's base is whole on every rank; set "
            "distributed.shard = 'auto', tensor_parallel = 1, and neither gather_in_compute_dtype nor cpu_offload"
        )
    if optim.kind == "adamw_8bit" and placement.shard != "replicate" and not adapter:
        yield (
            f"stages.{name}.{path}optim.kind = 'adamw_8bit': shards have moments in float32; set it to 'adamw', "
            "or distributed.shard = 'replicate'"
        )


def _learned(settings: Learning) -> tuple[str, str, OptimConfig]:
    """The path of what learns, the key of its adapter's rank where it has one, and its optimizer."""
    if isinstance(settings, RlConfig):
        return "update.", "update.lora.rank" if settings.update.lora.rank else "", settings.update.optim
    if isinstance(settings, DpoConfig):
        return "", "lora.rank" if settings.lora.rank else "", settings.optim
    is_adapted = isinstance(settings, RewardModelConfig) and settings.backbone.lora.rank > 0
    return "", "backbone.lora.rank" if is_adapted else "", settings.optim


def _of_ray(placement: PlacementConfig, name: str, settings: Learning, engine: EngineConfig) -> Iterator[str]:
    if not isinstance(settings, RlConfig):
        return
    kind = (settings.sampling.engine or engine).kind
    if placement.ray.num_rollout_workers and kind != "native":
        yield (
            f"distributed.ray.num_rollout_workers = {placement.ray.num_rollout_workers}: stages.{name} samples with "
            f"engine.kind = {kind!r}; "
            "set num_rollout_workers = 0: vLLM's servers are engine.replicas on this machine, or engine.urls"
        )
