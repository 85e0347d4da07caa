"""Workload of an engine, which determines its size."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from rlcore.config import EngineConfig, LoraConfig
from rlcore.models.runtime import Runtime


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Workload of an engine in a stage.

    ``max_tokens``: of the longest prompt and its completion. ``learns``: a learner shares the device, and
    ``learns_meanwhile``, while the engine samples, or ``takes_turns`` with it. ``adapter``: the policy's LoRA on the
    served checkpoint.
    """

    max_concurrent: int
    max_tokens: int
    learns: bool = False
    learns_meanwhile: bool = False
    takes_turns: bool = False
    adapter: LoraConfig = field(default_factory=LoraConfig)


def engine_dtype(config: EngineConfig, runtime: Runtime, adapter: LoraConfig) -> torch.dtype:
    """Return the precision of the engine; ``adapter``: the policy's LoRA on the served checkpoint."""
    if config.kind == "native":
        return runtime.of_native_engine(adapter).compute_dtype
    if config.dtype == "auto":
        return runtime.compute_dtype
    dtype: torch.dtype = getattr(torch, config.dtype)
    return dtype
