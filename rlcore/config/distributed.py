"""Settings of distributed training: one process, several ranks on this machine, or a Ray cluster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from rlcore.config.rl import RlConfig
from rlcore.config.sampling import EngineConfig
from rlcore.config.training import DpoConfig, OptimConfig, RewardModelConfig, SftConfig
from rlcore.errors import ConfigError
from rlcore.strict_config import Duration, NonNegativeFloat, NonNegativeInt, PositiveInt

Learning: TypeAlias = RlConfig | SftConfig | DpoConfig | RewardModelConfig


@dataclass(frozen=True, kw_only=True)
class RayConfig:
    """Ray cluster, and the processes that run on it besides the learner ranks.

    If the run uses GPUs, each rank and each rollout worker has its own.
    """

    address: str = ""  # a running cluster; empty: `RAY_ADDRESS`, or else a local cluster that ends with the run
    # processes with the built-in engine, which share the prompts; 0: the process of the run samples
    num_rollout_workers: NonNegativeInt = 0
    # processes for rewards, reward models and sandboxes; 0: the process of the run scores
    num_reward_workers: NonNegativeInt = 0
    cpus: PositiveInt = 1  # cores of each process
    reward_worker_gpus: NonNegativeFloat = 0.0  # GPUs per reward worker; a fraction shares one


@dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """Learner ranks."""

    # `local`: one process; `processes`: ranks on this machine; `ray`: ranks on a Ray cluster
    backend: Literal["local", "processes", "ray"] = "local"
    learner_ranks: PositiveInt = 1  # number of ranks; one per GPU
    # `full`: weights split among the ranks (FSDP2); `replicate`: all on each; `auto`: `replicate` with LoRA, else
    # `full`
    shard: Literal["auto", "full", "replicate"] = "auto"
    # gather shards in the compute precision: half the traffic; norms and embeddings then use it too
    gather_in_compute_dtype: bool = False
    # keep shards, gradients and moments in CPU memory, also with one rank; the optimizer steps on the CPU
    cpu_offload: bool = False
    # neighbouring ranks that split each layer's matrices and share samples; a divisor of learner_ranks
    tensor_parallel: PositiveInt = 1
    devices: tuple[NonNegativeInt, ...] = ()  # GPU indices of the ranks, among the visible ones; empty: the first ones
    timeout_minutes: Duration = 60.0  # longest call of a rank; then the ranks end; raise it for long updates
    max_restarts: NonNegativeInt = 3  # restarts of lost ranks, rollout workers and reward workers per run, of each kind
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
            raise ConfigError("tensor_parallel needs shards: shard = 'replicate' has none")
        if self.backend == "local" and any(of_ranks):
            raise ConfigError(
                "learner_ranks, shard, gather_in_compute_dtype, cpu_offload and devices need backend = 'processes' or "
                "'ray'"
            )
        if self.backend != "ray" and self.ray != RayConfig():
            raise ConfigError(f"ray.* needs backend = 'ray', got {self.backend!r}")
        if self.backend == "ray" and self.devices:
            raise ConfigError("devices is not used with backend = 'ray': Ray chooses the GPUs")
        if self.shard == "replicate" and self.gather_in_compute_dtype:
            raise ConfigError("gather_in_compute_dtype needs shards: shard = 'replicate' has none")
        if self.shard == "replicate" and self.cpu_offload:
            raise ConfigError("cpu_offload needs shards: shard = 'replicate' has none")
        if self.devices and len(self.devices) != self.learner_ranks:
            raise ConfigError(
                f"devices names {len(self.devices)} GPUs, {self.learner_ranks} ranks need {self.learner_ranks}"
            )

    def is_sharded(self, *, adapted: bool) -> bool:
        """Return True if the trained weights are split among the ranks. Ranks always hold the whole base of a LoRA."""
        return self.is_shared and self.shard != "replicate" and not adapted

    def takes_turns(self, *, staleness: int) -> bool:
        """Return True if an engine on the learner's GPU sleeps during updates.

        It cannot while it samples ahead, or if other processes keep the memory that their updates used.
        """
        return self.backend == "local" and not staleness

    @property
    def is_shared(self) -> bool:
        """True if a distributed learner is needed: several ranks, or CPU offload."""
        return self.learner_ranks > 1 or self.cpu_offload

    @property
    def numbers(self) -> Mapping[str, object]:
        """Settings that change the last digits of results, for the cache key of a stage."""
        if not self.is_shared:
            return {}
        own: dict[str, object] = {
            "learner_ranks": self.learner_ranks,
            "shard": self.shard,
            "gather_in_compute_dtype": self.gather_in_compute_dtype,
        }
        own |= {"cpu_offload": True} if self.cpu_offload else {}
        return own | ({"tensor_parallel": self.tensor_parallel} if self.tensor_parallel > 1 else {})


def distributed_errors(
    distributed: DistributedConfig, stages: Mapping[str, Learning], engine: EngineConfig
) -> list[str]:
    """Return the reasons why stages cannot run on these ranks or workers, each with its key.

    Args:
        distributed: Settings of the preset.
        stages: Settings of each stage, by name.
        engine: Engine of stages without an engine section.
    """
    return [
        error
        for name, settings in stages.items()
        for error in (*_of_ranks(distributed, name, settings), *_of_ray(distributed, name, settings, engine))
    ]


def _of_ranks(distributed: DistributedConfig, name: str, settings: Learning) -> Iterator[str]:
    if not distributed.is_shared:
        return
    path, lora, optim = _learned(settings)
    if lora and (
        distributed.shard == "full"
        or distributed.gather_in_compute_dtype
        or distributed.cpu_offload
        or distributed.tensor_parallel > 1
    ):
        yield (
            f"distributed: stages.{name}.{lora} > 0: every rank holds the whole base of a LoRA; set "
            "distributed.shard = 'auto', tensor_parallel = 1, and neither gather_in_compute_dtype nor cpu_offload"
        )
    if optim.kind == "adamw_8bit" and distributed.shard != "replicate" and not lora:
        yield (
            f"stages.{name}.{path}optim.kind = 'adamw_8bit': shards need float32 moments; set it to 'adamw', "
            "or distributed.shard = 'replicate'"
        )


def _learned(settings: Learning) -> tuple[str, str, OptimConfig]:
    """Return the key prefix of the trained weights, the key of the LoRA rank or "", and the optimizer settings."""
    if isinstance(settings, RlConfig):
        return "update.", "update.lora.rank" if settings.update.lora.rank else "", settings.update.optim
    if isinstance(settings, DpoConfig):
        return "", "lora.rank" if settings.lora.rank else "", settings.optim
    is_adapted = isinstance(settings, RewardModelConfig) and settings.backbone.lora.rank > 0
    return "", "backbone.lora.rank" if is_adapted else "", settings.optim


def _of_ray(distributed: DistributedConfig, name: str, settings: Learning, engine: EngineConfig) -> Iterator[str]:
    if not isinstance(settings, RlConfig):
        return
    kind = (settings.sampling.engine or engine).kind
    if distributed.ray.num_rollout_workers and kind != "native":
        yield (
            f"distributed.ray.num_rollout_workers = {distributed.ray.num_rollout_workers}: stages.{name} samples with "
            f"engine.kind = {kind!r}; "
            "set num_rollout_workers = 0: vLLM servers are set by engine.replicas or engine.urls"
        )
