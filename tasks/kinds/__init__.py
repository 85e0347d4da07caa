"""Kinds of stages, one folder each.

``settings.py`` is the table of a preset, ``step.py`` computes, ``page.py`` renders, and ``stage.py`` defines ``KIND``
(:class:`rlcore.tasks.kinds.kind.StageKind`), through which the pipeline uses the kind. The pipeline itself adds the
stages of folders that are not listed here.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any

KINDS: Mapping[str, str] = MappingProxyType(
    {
        "sft": "rlcore.tasks.kinds.sft.settings:SftStage",
        "dpo": "rlcore.tasks.kinds.dpo.settings:DpoStage",
        "reward_model": "rlcore.tasks.kinds.reward_model.settings:RewardModelStage",
        "rl": "rlcore.tasks.kinds.rl.settings:RlStage",
        "rejection": "rlcore.tasks.kinds.rejection.settings:RejectionStage",
        "difficulty": "rlcore.tasks.kinds.difficulty.settings:DifficultyStage",
        "win_rate": "rlcore.tasks.kinds.win_rate.settings:WinRateStage",
        "benchmark": "rlcore.tasks.kinds.benchmark.settings:BenchmarkStage",
    }
)
"""The kinds that a preset may name, with their tables."""


def load(name: str) -> Any:
    """Import the object that ``module:NAME`` names, so that presets are read without the libraries of steps."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)
