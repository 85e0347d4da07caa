"""Settings of the rollout engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from rlcore.config.bounds import Duration, Fraction, NonNegativeFloat, NonNegativeInt, PositiveInt
from rlcore.errors import ConfigError
from rlcore.strict_config import AtLeast, Below

TransferKind = Literal["auto", "file", "shared_memory", "gloo", "nccl", "ipc"]


@dataclass(frozen=True, kw_only=True)
class TimeoutConfig:
    """Timeouts of an engine. ``request_seconds``: per completion; a completion that times out is requested again."""

    startup_seconds: Duration = 600.0
    request_seconds: Annotated[float, AtLeast(0.0), Below(1e6)] = 0.0  # 0: ten minutes plus 0.1 s for each token

    def for_request(self, num_tokens: int) -> float:
        """Return the seconds that a completion of ``num_tokens`` may take."""
        return self.request_seconds or 600.0 + 0.1 * num_tokens


@dataclass(frozen=True, kw_only=True)
class GpuConfig:
    """GPUs of the servers that the run starts. Each server uses ``tensor_parallel`` of them.

    ``devices``: indices among the visible GPUs, assigned in order. Empty: all but the trainer's; if there is only one,
    trainer and server share it. ``gpu_memory_utilization``: fraction of a GPU's memory for its server.
    """

    devices: tuple[NonNegativeInt, ...] = ()
    tensor_parallel: PositiveInt = 1
    gpu_memory_utilization: Fraction = 0.0  # 0: 0.85 of free memory; on the learner's GPU at most 0.4 of all memory


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Engine: ``native`` (in this process) or ``vllm`` (servers).

    The stage starts ``replicas`` servers with the interpreter ``python`` (empty: this one) and stops them at its end.
    ``urls``: use running servers instead. Several servers share the prompts. ``dtype``: ``auto`` is the trainer's
    compute precision.

    ``weight_transfer``: path of new weights to a server. ``file`` uses the folder ``weight_dir``, which the server must
    see (empty: a folder in memory if there is one, else a temporary one). ``shared_memory``, ``gloo`` (TCP), ``nccl``
    and ``ipc`` (between GPUs) use vLLM's weight-transfer API. ``auto``: for a started server ``nccl`` between GPUs if
    vLLM is installed here too, else ``shared_memory``; for a running one, or if memory is short, ``file``.
    """

    kind: Literal["native", "vllm"] = "native"
    python: str = ""
    urls: tuple[str, ...] = ()
    replicas: PositiveInt = 1
    gpus: GpuConfig = field(default_factory=GpuConfig)
    weight_transfer: TransferKind = "auto"
    weight_dir: str = ""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_model_len: NonNegativeInt = 0  # tokens of prompt and completion; 0: fits the longest text
    kv_cache_gib: NonNegativeFloat = 0.0  # 0: the rest of gpus.gpu_memory_utilization
    enforce_eager: bool | None = None  # false: compile, with CUDA graphs; starts slower; left out: false on GPUs only
    timeouts: TimeoutConfig = field(default_factory=TimeoutConfig)

    def __post_init__(self) -> None:
        is_placed = bool(self.gpus.devices) or self.gpus.tensor_parallel > 1
        if self.urls and (self.python or self.replicas > 1 or is_placed):
            raise ConfigError(
                "urls uses running servers; python, replicas and gpus start new ones: set one or the other"
            )
        if len(set(self.urls)) < len(self.urls):
            raise ConfigError("urls has a server twice")
        if self.weight_dir and self.weight_transfer == "shared_memory":
            raise ConfigError("weight_transfer = 'shared_memory' needs no folder: leave weight_dir empty")
        named, width = len(self.gpus.devices), self.gpus.tensor_parallel
        if named and named != self.replicas * width:
            raise ConfigError(
                f"gpus.devices has {named} GPUs, {self.replicas} replicas of {width} need {self.replicas * width}: "
                "list one for each, and a GPU twice if two replicas share it"
            )

    @property
    def numbers(self) -> Mapping[str, object]:
        """Settings that change results, for the cache key of a stage. Location and speed are left out."""
        if self.kind == "native":
            return {"kind": self.kind}
        names = ("kind", "dtype", "max_model_len", "enforce_eager")
        return {name: getattr(self, name) for name in names} | {"tensor_parallel": self.gpus.tensor_parallel}
