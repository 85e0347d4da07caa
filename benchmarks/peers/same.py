"""Assertion that both sides of a comparison did the same work. Without it there is no figure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

OTHERS = "products of other passes"
EXACT = (
    "sequences",
    "tokens",
    "trained tokens",
    "token ids",
    "updates",
    "weights",
    "products of updates",
    OTHERS,
)
ADVANTAGE = {"float32": 1e-3, "bfloat16": 1e-1}  # TRL adds 1e-4 to the standard deviation; PPO's come from models
GRADIENT = {"float32": 2e-3, "bfloat16": 5e-2}  # relative, of the norm over all parameters


class UnequalWorkError(Exception):
    """Two sides did different work; names the first differences."""


def require_same_work(first: Mapping[str, Any], second: Mapping[str, Any], *, names: tuple[str, str]) -> None:
    """Compare the observed work of two records, as :mod:`benchmarks.peers.record` reports it.

    Raises:
        UnequalWorkError: Token ids, counts, advantages, updates, gradients or precisions differ.
    """
    found = differences(first, second)
    if found:
        lines = [f"{name}: {names[0]} {left}, {names[1]} {right}" for name, left, right in found]
        raise UnequalWorkError(f"{names[0]} and {names[1]} did different work, so no figure:\n  " + "\n  ".join(lines))


def differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return the name of each difference with both values."""
    # passes without gradient are those of generation; in other tasks a side may have none that is observed
    names = EXACT if first[OTHERS] and second[OTHERS] else [name for name in EXACT if name != OTHERS]
    found = [(name, first[name], second[name]) for name in names if first[name] != second[name]]
    if not found:
        advantage, gradient = (
            max(bounds[name] for name in first["products of updates"]) for bounds in (ADVANTAGE, GRADIENT)
        )
        found = _far("advantages", [first["advantages"]], [second["advantages"]], advantage)
        found += _far("gradients", first["gradients"], second["gradients"], gradient)
    return found


def _far(
    name: str, first: Sequence[Sequence[float]], second: Sequence[Sequence[float]], bound: float
) -> list[tuple[str, Any, Any]]:
    """Return the first pair of vectors that differ by more than ``bound`` times their norm."""
    for left, right in zip(first, second, strict=True):
        if len(left) != len(right) or math.dist(left, right) > bound * math.hypot(*left):
            shown = f"{len(left)} numbers of norm {math.hypot(*left):.6g}"
            return [(name, shown, f"{len(right)} of {math.hypot(*right):.6g}")]
    return []
