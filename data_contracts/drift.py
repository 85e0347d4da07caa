"""How far the sketches of a new dataset lie from those of the last accepted one, and whether that is too far.

    PSI = Σ_bins (p - q) ln(p / q)          population stability index (Siddiqi 2006, Credit Risk Scorecards)
    KS  = max_edges |P - Q|                 largest difference of the cumulative shares, over the edges of the bins

A column has moved when a distance is beyond its threshold *and* beyond what chance alone gives two samples of these
sizes. Without the second condition a small dataset would always seem to drift: with n and m rows in B bins and no
drift, PSI is about (1/n + 1/m) χ²(B - 1).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from data_contracts.sketches import Sketch

Level = Literal["calm", "warn", "refuse"]
Floats = NDArray[np.float64]
_LEVELS: tuple[Level, ...] = ("calm", "warn", "refuse")
_OTHERS = "(all others)"


@dataclass(frozen=True, kw_only=True)
class DriftLimits:
    """Where a distance warns and where it refuses; ``chance``: how often chance alone may exceed its bound."""

    warn_psi: float = 0.1
    refuse_psi: float = 0.25
    warn_ks: float = 0.1
    refuse_ks: float = 0.25
    chance: float = 0.001


@dataclass(frozen=True, kw_only=True)
class Move:
    """How the share of one bin or name changed, in 0..1."""

    name: str
    before: float
    after: float


@dataclass(frozen=True, kw_only=True)
class ColumnDrift:
    """One column of two datasets. ``ks`` is 0 for names, which have no order.

    ``psi_by_chance`` and ``ks_by_chance``: what chance alone exceeds with the probability of the limits.
    ``before`` and ``after``: number of values counted. ``means`` of a histogram's column, before and after.
    ``moves``: the bins whose shares changed most, the largest change first.
    """

    column: str
    level: Level
    psi: float
    psi_by_chance: float
    ks: float
    ks_by_chance: float
    before: int
    after: int
    means: tuple[float, float] | None
    moves: tuple[Move, ...]


def judge(
    accepted: Mapping[str, Sketch], new: Mapping[str, Sketch], limits: DriftLimits | None = None
) -> tuple[ColumnDrift, ...]:
    """Every column that both have, the worst first; columns whose sketches were made otherwise are left out."""
    limits = limits or DriftLimits()
    shared = [name for name in accepted.keys() & new.keys() if _bins(accepted[name]) == _bins(new[name])]
    found = [_judge_column(name, accepted[name], new[name], limits) for name in shared]
    return tuple(sorted(found, key=lambda one: (-_LEVELS.index(one.level), -one.psi, one.column)))


def not_compared(accepted: Mapping[str, Sketch], new: Mapping[str, Sketch]) -> tuple[str, ...]:
    """The columns that :func:`judge` leaves out."""
    names = sorted(accepted.keys() | new.keys())
    return tuple(name for name in names if _bins(accepted.get(name)) != _bins(new.get(name)))


def worst_level(columns: tuple[ColumnDrift, ...]) -> Level:
    """The worst level of all columns; ``calm`` where there is none."""
    return max((one.level for one in columns), key=_LEVELS.index, default="calm")


def psi(before: Floats, after: Floats) -> float:
    """Population stability index of two rows of counts [B]; an empty bin counts as half a row. Never negative."""
    p, q = _floored(before), _floored(after)
    return float(((p - q) * np.log(p / q)).sum())


def ks(before: Floats, after: Floats) -> float:
    """Largest difference of the cumulative shares of two rows of counts [B], in 0..1."""
    return float(np.abs(np.cumsum(_shares(before)) - np.cumsum(_shares(after))).max(initial=0.0))


def psi_by_chance(num_bins: int, before: int, after: int, chance: float) -> float:
    """What PSI exceeds with probability ``chance`` without drift: (1/n + 1/m) · quantile of χ²(bins - 1).

    The quantile is Wilson's and Hilferty's (1931), within 2 % from 2 degrees of freedom on. Infinite without rows.
    """
    if not before or not after:
        return math.inf
    degrees = num_bins - 1
    if degrees < 1:
        return 0.0
    spread = 2.0 / (9.0 * degrees)
    quantile = degrees * (1.0 - spread + NormalDist().inv_cdf(1.0 - chance) * math.sqrt(spread)) ** 3
    return (1.0 / before + 1.0 / after) * quantile


def ks_by_chance(before: int, after: int, chance: float) -> float:
    """What KS exceeds with probability ``chance`` at most without drift: √(ln(2 / chance) / 2 · (1/n + 1/m))."""
    if not before or not after:
        return math.inf
    return math.sqrt(math.log(2.0 / chance) / 2.0 * (1.0 / before + 1.0 / after))


def _judge_column(name: str, accepted: Sketch, new: Sketch, limits: DriftLimits) -> ColumnDrift:
    labels, before, after = _aligned(accepted, new)
    n, m = int(before.sum()), int(after.sum())
    is_ordered = accepted["kind"] == "histogram"
    occupied = int(((before + after) > 0).sum())
    by_psi, by_ks = psi_by_chance(occupied, n, m, limits.chance), ks_by_chance(n, m, limits.chance)
    far_psi, far_ks = psi(before, after), ks(before, after) if is_ordered else 0.0
    levels = (
        _level(far_psi, by_psi, limits.warn_psi, limits.refuse_psi),
        _level(far_ks, by_ks, limits.warn_ks, limits.refuse_ks),
    )
    return ColumnDrift(
        column=name,
        level=max(levels, key=_LEVELS.index),
        psi=far_psi,
        psi_by_chance=by_psi,
        ks=far_ks,
        ks_by_chance=by_ks,
        before=n,
        after=m,
        means=(accepted["mean"], new["mean"]) if is_ordered else None,
        moves=_moves(labels, before, after),
    )


def _level(distance: float, by_chance: float, warn: float, refuse: float) -> Level:
    if distance <= by_chance or distance < warn:
        return "calm"
    return "refuse" if distance >= refuse else "warn"


def _aligned(accepted: Sketch, new: Sketch) -> tuple[list[str], Floats, Floats]:
    """Labels of the bins, and the counts of both in the same order."""
    if accepted["kind"] == "histogram":
        edges = [f"{edge:g}" for edge in accepted["edges"]]
        between = [f"{low} to {high}" for low, high in pairwise(edges)]
        labels = [f"up to {edges[0]}", *between, f"above {edges[-1]}"]
        return labels, np.array(accepted["counts"], dtype=np.float64), np.array(new["counts"], dtype=np.float64)
    names = sorted({*accepted["counts"], *new["counts"]})
    before, after = ([*(side["counts"].get(name, 0) for name in names), side["others"]] for side in (accepted, new))
    return [*names, _OTHERS], np.array(before, dtype=np.float64), np.array(after, dtype=np.float64)


def _moves(labels: list[str], before: Floats, after: Floats) -> tuple[Move, ...]:
    p, q = _shares(before), _shares(after)
    sizes = np.abs(q - p).round(9)  # equal changes differ by rounding; they keep the order of the bins
    order = np.argsort(-sizes, kind="stable").tolist()
    found = [Move(name=labels[place], before=float(p[place]), after=float(q[place])) for place in order[:3]]
    return tuple(move for move in found if move.before != move.after)


def _bins(sketch: Sketch | None) -> object:
    return None if sketch is None else (sketch["kind"], sketch.get("edges"))


def _shares(counts: Floats) -> Floats:
    return counts / max(1.0, float(counts.sum()))


def _floored(counts: Floats) -> Floats:
    return np.maximum(_shares(counts), 0.5 / max(1.0, float(counts.sum())))
