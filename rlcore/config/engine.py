"""Settings of the rollout engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from rlcore.config.bounds import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from rlcore.errors import ConfigError

TransferKind = Literal["auto", "file", "shared_memory", "gloo", "nccl", "ipc"]


@dataclass(frozen=True, kw_only=True)
class DeadlineConfig:
    """How long an engine may take. ``request_seconds``: for one completion; after that it is requested again."""

    startup_seconds: PositiveFloat = 600.0
    request_seconds: NonNegativeFloat = 0.0  # 0: ten minutes plus 0.1 s for each token

    def of_request(self, num_tokens: int) -> float:
        """Seconds that a completion of ``num_tokens`` may take."""
        return self.request_seconds or 600.0 + 0.1 * num_tokens


@dataclass(frozen=True, kw_only=True)
class GpuConfig:
    """The GPUs of the servers that are started here: each computes on ``tensor_parallel`` of them.

    They are taken in order from ``devices``, indices of the GPUs that this process sees. Empty: all but the trainer's;
    if there is only one, trainer and server share it. ``gpu_memory_utilization``: the share of a GPU that a server
    takes.
    """

    devices: tuple[NonNegativeInt, ...] = ()
    tensor_parallel: PositiveInt = 1
    gpu_memory_utilization: Fraction = 0.0  # 0: 0.85 of the free memory; beside a learner at most 0.4 of all


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What samples completions: ``native``; ``vllm``, servers of their own; ``vllm_inprocess``, vLLM in this process.

    ``replicas`` servers are started with the interpreter ``python`` (empty: this one) and ended with the stage; with
    ``urls`` running ones are used. Prompts are dealt among several servers. ``dtype`` ``auto`` is the precision that
    the trainer computes in.

    ``weight_transfer`` is how new weights reach a server: ``file`` in the folder ``weight_dir``, which it has to see
    (empty: one in memory where there is such, else a temporary one); ``shared_memory``, ``gloo`` (over TCP), ``nccl``
    and ``ipc`` (from GPU to GPU) by vLLM's weight-transfer API. ``auto``, for a server that is started here, is
    ``nccl`` between GPUs where vLLM is installed here too, else ``shared_memory``; ``file`` for one that runs or where
    memory is short.
    """

    kind: Literal["native", "vllm", "vllm_inprocess"] = "native"
    python: str = ""
    urls: tuple[str, ...] = ()
    replicas: PositiveInt = 1
    gpus: GpuConfig = field(default_factory=GpuConfig)
    weight_transfer: TransferKind = "auto"
    weight_dir: str = ""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_model_len: NonNegativeInt = 0  # tokens of prompt and completion; 0: what the longest text needs
    kv_cache_gib: NonNegativeFloat = 0.0  # 0: what gpus.gpu_memory_utilization leaves
    enforce_eager: bool | None = None  # False: compile, with CUDA graphs; starts slower; left out: False on GPUs only
    timeouts: DeadlineConfig = field(default_factory=DeadlineConfig)

    def __post_init__(self) -> None:
        is_placed = bool(self.gpus.devices) or self.gpus.tensor_parallel > 1
        if self.urls and (self.python or self.replicas > 1 or is_placed):
            raise ConfigError(
                "urls names servers that run already; python, replicas and gpus start new ones: set one or the other"
            )
        if len(set(self.urls)) < len(self.urls):
            raise ConfigError("urls names a server twice")
        of_servers = (
            self.python,
            self.urls,
            self.replicas > 1,
            is_placed,
            self.weight_transfer != "auto",
            self.weight_dir,
        )
        if self.kind == "vllm_inprocess" and any(of_servers):
            raise ConfigError(
                "python, urls, replicas, gpus.devices, gpus.tensor_parallel, weight_transfer and weight_dir belong to "
                "servers: "
                "vllm_inprocess has none"
            )
        if self.weight_dir and self.weight_transfer == "shared_memory":
            raise ConfigError("weight_transfer = 'shared_memory' needs no folder: leave weight_dir empty")
        named, width = len(self.gpus.devices), self.gpus.tensor_parallel
        if named and named != self.replicas * width:
            raise ConfigError(
                f"gpus.devices names {named} GPUs, {self.replicas} replicas of {width} need {self.replicas * width}: "
                "name one for each, and a GPU twice if two replicas share it"
            )

    @property
    def numbers(self) -> Mapping[str, object]:
        """What changes the numbers that come out, for the key of a stage; where it runs and how fast does not."""
        if self.kind == "native":
            return {"kind": self.kind}
        names = ("kind", "dtype", "max_model_len", "enforce_eager")
        return {name: getattr(self, name) for name in names} | {"tensor_parallel": self.gpus.tensor_parallel}
