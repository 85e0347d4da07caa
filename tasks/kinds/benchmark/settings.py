"""Preset table of a benchmark stage."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from rlcore.config.benchmark import BenchmarkConfig
from rlcore.strict_config import INLINE
from rlcore.tasks.kinds.facts import Product, Rows


@dataclass(frozen=True, kw_only=True)
class BenchmarkStage:
    """Tasks of the language model evaluation harness, run on ``policy``. The stage reads no dataset of the preset."""

    produces: ClassVar[Product] = "measurements"
    consumes: ClassVar[Rows] = "prompts"
    data_key: ClassVar[str] = ""
    is_compared: ClassVar[bool] = True
    kind: Literal["benchmark"]
    policy: str
    settings: BenchmarkConfig = field(metadata=INLINE)
