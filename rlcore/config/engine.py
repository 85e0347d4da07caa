"""Settings of the rollout engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from rlcore.config.bounds import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from rlcore.errors import ConfigError
from rlcore.strict import AtLeast

TransferKind = Literal["auto", "file", "shared_memory", "gloo", "nccl", "ipc"]


@dataclass(frozen=True, kw_only=True)
class DeadlineConfig:
    """How long an engine may take."""

    start_seconds: PositiveFloat = 600.0
    request_seconds: PositiveFloat = 600.0  # of one completion; then it is asked for again


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What samples the rollouts: ``native``; ``vllm``, servers of their own; ``vllm_inprocess``, vLLM in this process.

    ``replicas`` servers are started with the interpreter ``python`` (empty: this one) and ended with the run; with
    ``urls`` running ones are used. Prompts are dealt among several servers. ``dtype`` ``auto`` is the precision that
    the trainer computes in.

    ``transfer`` is how new weights reach a server: ``file`` in the folder ``exchange``, which it has to see (empty: one
    in memory where there is such, else a temporary one); ``shared_memory``, ``gloo`` (over TCP), ``nccl`` and ``ipc``
    (from GPU to GPU) by vLLM's weight-transfer API; ``auto`` is ``shared_memory`` for a server that is started here,
    ``file`` for one that runs or where memory is short.
    """

    kind: Literal["native", "vllm", "vllm_inprocess"] = "native"
    python: str = ""
    urls: tuple[str, ...] = ()
    replicas: PositiveInt = 1
    transfer: TransferKind = "auto"
    exchange: str = ""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_model_len: NonNegativeInt = 0  # tokens of prompt and completion; 0: all positions of the model
    memory_fraction: Annotated[float, AtLeast(0.01)] = 0.85  # of the GPU, where kv_cache_gib is 0
    kv_cache_gib: NonNegativeFloat = 0.0
    eager: bool = True  # False: compiled and with CUDA graphs; slower to start, faster on a GPU
    deadlines: DeadlineConfig = field(default_factory=DeadlineConfig)

    def __post_init__(self) -> None:
        if self.urls and (self.python or self.replicas > 1):
            raise ConfigError("urls names servers that run, python and replicas those to be started: name only one")
        if len(set(self.urls)) < len(self.urls):
            raise ConfigError("urls names a server twice")
        if self.memory_fraction > 1.0:
            raise ConfigError("memory_fraction must not be above 1")
        of_servers = (self.python, self.urls, self.replicas > 1, self.transfer != "auto", self.exchange)
        if self.kind == "vllm_inprocess" and any(of_servers):
            raise ConfigError("python, urls, replicas, transfer and exchange are of servers, vllm_inprocess has none")
        if self.exchange and self.transfer == "shared_memory":
            raise ConfigError("exchange names a folder, shared_memory needs none: name only one")
