"""Settings of the rollout engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from rlcore.config.bounds import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from rlcore.errors import ConfigError
from rlcore.strict import AtLeast


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What samples the rollouts: ``native`` in this process, or ``vllm``, a server of its own.

    ``replicas`` servers are started with the interpreter ``python`` (empty: this one) and ended with the run; with
    ``urls`` running ones are used, which have to read ``exchange``, the folder through which weights reach them (empty:
    one in memory where there is such, else a temporary one). Prompts are dealt among several servers. ``dtype``
    ``auto`` is the precision that the trainer computes in.
    """

    kind: Literal["native", "vllm"] = "native"
    python: str = ""
    urls: tuple[str, ...] = ()
    replicas: PositiveInt = 1
    exchange: str = ""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_model_len: NonNegativeInt = 0  # tokens of prompt and completion; 0: all positions of the model
    memory_fraction: Annotated[float, AtLeast(0.01)] = 0.85  # of the GPU, where kv_cache_gib is 0
    kv_cache_gib: NonNegativeFloat = 0.0
    eager: bool = True  # False: compiled and with CUDA graphs; slower to start, faster on a GPU
    start_seconds: PositiveFloat = 600.0
    request_seconds: PositiveFloat = 600.0  # of one completion; then it is asked for again

    def __post_init__(self) -> None:
        if self.urls and (self.python or self.replicas > 1):
            raise ConfigError("urls names servers that run, python and replicas those to be started: name only one")
        if len(set(self.urls)) < len(self.urls):
            raise ConfigError("urls names a server twice")
        if self.memory_fraction > 1.0:
            raise ConfigError("memory_fraction must not be above 1")
