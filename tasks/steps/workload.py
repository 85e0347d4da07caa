"""The work for which an engine is sized."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from rlcore.config import EngineConfig, LoraConfig
from rlcore.hardware.runtime import Runtime


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """The work of an engine in a stage, by which it is sized.

    ``max_tokens``: of the longest prompt and its completion. ``learns``: a learner computes beside the engine, and
    ``learns_meanwhile``, while it samples. ``adapter``: the shape of the policy's, on the checkpoint that is served.
    """

    max_concurrent: int
    max_tokens: int
    learns: bool = False
    learns_meanwhile: bool = False
    adapter: LoraConfig = field(default_factory=LoraConfig)


def engine_dtype(config: EngineConfig, runtime: Runtime) -> torch.dtype:
    """The precision that the engine computes in."""
    if config.kind == "native" or config.dtype == "auto":
        return runtime.compute_dtype
    dtype: torch.dtype = getattr(torch, config.dtype)
    return dtype
