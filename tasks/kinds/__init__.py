"""Kinds of stages, one folder each.

``kind.py`` has the table of a preset and ``KIND`` (:class:`rlcore.tasks.kinds.kind.StageKind`), through which the
pipeline uses the kind; ``step.py`` computes, and ``page.py`` renders. The pipeline itself adds the stages of folders
that are not listed here. A preset may also name a table as ``module:NAME``, next to the ``KIND`` of its module.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any

KINDS: Mapping[str, str] = MappingProxyType(
    {
        "sft": "rlcore.tasks.kinds.sft.kind:SftStage",
        "dpo": "rlcore.tasks.kinds.dpo.kind:DpoStage",
        "reward_model": "rlcore.tasks.kinds.reward_model.kind:RewardModelStage",
        "rl": "rlcore.tasks.kinds.rl.kind:RlStage",
        "rejection": "rlcore.tasks.kinds.rejection.kind:RejectionStage",
        "difficulty": "rlcore.tasks.kinds.difficulty.kind:DifficultyStage",
        "win_rate": "rlcore.tasks.kinds.win_rate.kind:WinRateStage",
        "benchmark": "rlcore.tasks.kinds.benchmark.kind:BenchmarkStage",
    }
)
"""The kinds that a preset may name, with their tables."""


def load(name: str) -> Any:
    """Import the object that ``module:NAME`` names, so that presets are read without the libraries of steps."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)


def table_name(kind: str) -> str:
    """Return the table of a kind as ``module:NAME``, which the kinds of others are called.

    Raises:
        KeyError: there is no such kind.
    """
    return kind if ":" in kind else KINDS[kind]
