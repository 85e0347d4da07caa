"""Distances between the sketches of a new dataset and those of the last accepted one, with limits.

    PSI = Σ_bins (p - q) ln(p / q)          population stability index (Siddiqi 2006, Credit Risk Scorecards)
    KS  = max_edges |P - Q|                 largest difference of the cumulative fractions, over the edges of the bins

Chance alone makes PSI positive, by about (bins - 1)(1/n + 1/m) with n and m rows, which is subtracted. A column has
moved if a distance exceeds its threshold *and* the noise. A permutation test measures the noise: the values of both
datasets are divided at random into two sets of the same sizes, assuming only that they were drawn independently. The
distance must be among the largest of those. Values that come in documents count as fewer independent ones (the design
effect of a sketch).

Names beyond the 50 of a sketch are compared in hash buckets, whose total counts both sides know. Fewer rows are
compared in fewer buckets, so that noise stays below the warning threshold.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rlcore.data_contracts.drift.sketches import NUM_BUCKETS, Sketch, bucket_of

Level = Literal["calm", "warn", "refuse"]
Floats = NDArray[np.float64]
_LEVELS: tuple[Level, ...] = ("calm", "warn", "refuse")
_MIN_BUCKETS = 16
_ROWS_SQUARED = 2_000  # h² rows per bucket: √(2 buckets) · 3 / h, the noise limit, is then 0.1, where PSI warns
_SLACK = 1e-9  # equal distances differ by rounding, which is within noise
_CHUNK_VALUES = 2_000_000  # permutations at a time: 16 MB


@dataclass(frozen=True, kw_only=True)
class DriftLimits:
    """Distances that warn and that reject; ``chance``: how often noise alone may exceed its bound."""

    warn_psi: float = 0.1
    refuse_psi: float = 0.25
    warn_ks: float = 0.1
    refuse_ks: float = 0.25
    chance: float = 0.001


@dataclass(frozen=True, kw_only=True)
class Move:
    """Change of the fraction of one bin or name, in 0..1."""

    name: str
    before: float
    after: float


@dataclass(frozen=True, kw_only=True)
class ColumnDrift:
    """Drift of one column. ``psi``: less its mean under chance, not below 0. ``ks``: 0 for names.

    ``psi_by_chance`` and ``ks_by_chance``: values that chance alone exceeds with the probability of the limits.
    ``before`` and ``after``: number of values counted. ``means`` of a histogram's column, before and after. ``moves``:
    the bins or names whose fractions changed most, the largest change first. If a sketch has dropped a name, its
    fraction there is the one with the smallest change that is possible.
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


def compare_columns(
    accepted: Mapping[str, Sketch], new: Mapping[str, Sketch], limits: DriftLimits | None = None
) -> tuple[ColumnDrift, ...]:
    """Compare all common columns, the worst first; columns with incompatible sketches are left out."""
    limits = limits or DriftLimits()
    shared = [name for name in accepted.keys() & new.keys() if _is_comparable(accepted[name], new[name])]
    found = [_compare_column(name, accepted[name], new[name], limits) for name in shared]
    return tuple(sorted(found, key=lambda one: (-_LEVELS.index(one.level), -one.psi, one.column)))


def not_compared(accepted: Mapping[str, Sketch], new: Mapping[str, Sketch]) -> tuple[str, ...]:
    """Return the columns that :func:`compare_columns` leaves out."""
    names = sorted(accepted.keys() | new.keys())
    return tuple(name for name in names if not _is_comparable(accepted.get(name), new.get(name)))


def worst_level(columns: tuple[ColumnDrift, ...]) -> Level:
    """Return the worst level of all columns; ``calm`` without columns."""
    return max((one.level for one in columns), key=_LEVELS.index, default="calm")


def psi(before: Floats, after: Floats) -> float:
    """Return the population stability index of two rows of counts [B]; never negative.

    A bin that is empty on one side counts as half a row there; a bin that is empty on both sides is ignored.
    """
    is_filled = before + after > 0
    return float(_psi(before[is_filled], after[is_filled]))


def ks(before: Floats, after: Floats) -> float:
    """Return the largest difference of the cumulative fractions of two rows of counts [B], in 0..1."""
    return float(_ks(before, after))


@dataclass(frozen=True, kw_only=True)
class Chance:
    """Distances between two samples of the same values: mean of PSI, and the quantiles of PSI and KS."""

    mean_psi: float
    psi: float
    ks: float


def by_chance(before: Floats, after: Floats, chance: float) -> Chance:
    """Return PSI and KS of two rows of counts [B] without drift, by 2 / ``chance`` - 1 permutations of their values.

    Whole values are permuted; fractions of counts are rounded so that their sums are kept. The bounds are infinite if a
    side has no rows.
    """
    heaps = [np.diff(np.rint(np.cumsum(side)), prepend=0.0).astype(np.int64) for side in (before, after)]
    pooled, size = heaps[0] + heaps[1], min(int(heap.sum()) for heap in heaps)
    if not size:
        return Chance(mean_psi=0.0, psi=math.inf, ks=math.inf)
    pooled, deals = pooled[pooled > 0], math.ceil(2.0 / chance) - 1
    generator = np.random.default_rng(pooled.tolist())  # seeded by the data: no column is always unlucky
    chunk = max(1, _CHUNK_VALUES // len(pooled))
    of_psi, of_ks = np.empty(deals), np.empty(deals)
    for start in range(0, deals, chunk):
        part = slice(start, min(start + chunk, deals))
        dealt = generator.multivariate_hypergeometric(pooled, size, size=part.stop - start).astype(np.float64)
        of_psi[part], of_ks[part] = _psi(dealt, pooled - dealt), _ks(dealt, pooled - dealt)
    rank = -max(1, math.floor(chance * (deals + 1) + 1e-9))  # the data are one of deals + 1 equally likely ones
    return Chance(mean_psi=float(of_psi.mean()), psi=float(np.sort(of_psi)[rank]), ks=float(np.sort(of_ks)[rank]))


def num_buckets(before: float, after: float) -> int:
    """Return the number of buckets for the names of ``before`` and ``after`` rows: a power of two, 16 to 1,024."""
    half = before * after / max(1.0, before + after)
    return int(min(NUM_BUCKETS, max(_MIN_BUCKETS, 2 ** math.floor(math.log2(max(1.0, half**2 / _ROWS_SQUARED))))))


def _compare_column(name: str, accepted: Sketch, new: Sketch, limits: DriftLimits) -> ColumnDrift:
    before, after = _aligned(accepted, new)
    before, after = before / accepted["design_effect"], after / new["design_effect"]
    is_ordered = accepted["kind"] == "histogram"
    alone = by_chance(before, after, limits.chance)
    found = max(0.0, psi(before, after) - alone.mean_psi) if before.any() and after.any() else 0.0
    far_psi, far_ks = found if found > _SLACK else 0.0, ks(before, after) if is_ordered else 0.0
    bound = alone.psi - alone.mean_psi
    levels = (
        _level(far_psi, bound, limits.warn_psi, limits.refuse_psi),
        _level(far_ks, alone.ks, limits.warn_ks, limits.refuse_ks),
    )
    return ColumnDrift(
        column=name,
        level=max(levels, key=_LEVELS.index),
        psi=far_psi,
        psi_by_chance=bound,
        ks=far_ks,
        ks_by_chance=alone.ks,
        before=round(before.sum()),
        after=round(after.sum()),
        means=(accepted["mean"], new["mean"]) if is_ordered else None,
        moves=_moves(*(_of_bins(accepted["edges"], before, after) if is_ordered else _of_names(accepted, new))),
    )


def _level(distance: float, by_chance: float, warn: float, refuse: float) -> Level:
    if distance <= by_chance + _SLACK or distance < warn:
        return "calm"
    return "refuse" if distance >= refuse else "warn"


def _aligned(accepted: Sketch, new: Sketch) -> tuple[Floats, Floats]:
    if accepted["kind"] == "histogram":
        return np.array(accepted["counts"], dtype=np.float64), np.array(new["counts"], dtype=np.float64)
    if not (accepted["others"] or new["others"]):
        names = sorted({*accepted["counts"], *new["counts"]})
        return _named(accepted, names), _named(new, names)
    before, after = _buckets(accepted), _buckets(new)
    count = num_buckets(float(before.sum()), float(after.sum()))
    return before.reshape(-1, count).sum(axis=0), after.reshape(-1, count).sum(axis=0)


def _named(sketch: Sketch, names: list[str]) -> Floats:
    return np.array([sketch["counts"].get(name, 0) for name in names], dtype=np.float64)


def _buckets(sketch: Sketch, *, kept_alone: bool = False) -> Floats:
    """Return counts by bucket [1,024] of all names, or of only those kept by name."""
    if sketch["others"] and not kept_alone:
        return np.array(sketch["buckets"], dtype=np.float64)
    places = np.array([bucket_of(name) for name in sketch["counts"]], dtype=np.int64)
    return np.bincount(places, weights=list(sketch["counts"].values()), minlength=NUM_BUCKETS).astype(np.float64)


def _of_bins(edges: list[float], before: Floats, after: Floats) -> tuple[list[str], Floats, Floats]:
    texts = [f"{edge:g}" for edge in edges]
    between = [f"{low} to {high}" for low, high in pairwise(texts)]
    return [f"up to {texts[0]}", *between, f"above {texts[-1]}"], _shares(before), _shares(after)


def _of_names(accepted: Sketch, new: Sketch) -> tuple[list[str], Floats, Floats]:
    """Return the names that either has kept, and their fractions in both."""
    names = sorted({*accepted["counts"], *new["counts"]})
    low, high = zip(*(_possible_shares(side, names) for side in (accepted, new)), strict=True)
    return names, np.clip(low[1], low[0], high[0]), np.clip(low[0], low[1], high[1])


def _possible_shares(sketch: Sketch, names: list[str]) -> tuple[Floats, Floats]:
    """Return the smallest and largest fraction of each name: of a dropped one, 0 or the rest of its bucket.

    It is also no more frequent than the rarest kept name.
    """
    low = _named(sketch, names)
    left = np.maximum(_buckets(sketch) - _buckets(sketch, kept_alone=True), 0.0)
    rarest = min(sketch["counts"].values(), default=0)
    cut = np.minimum(left[[bucket_of(name) for name in names]], rarest)
    high = np.where([name in sketch["counts"] for name in names], low, cut)
    total = max(1.0, float(_buckets(sketch).sum()))
    return low / total, high / total


def _moves(labels: list[str], p: Floats, q: Floats) -> tuple[Move, ...]:
    sizes = np.abs(q - p).round(9)  # equal changes differ by rounding; they keep the order of the bins
    order = np.argsort(-sizes, kind="stable").tolist()
    found = [Move(name=labels[place], before=float(p[place]), after=float(q[place])) for place in order[:3]]
    return tuple(move for move in found if move.before != move.after)


def _is_comparable(accepted: Sketch | None, new: Sketch | None) -> bool:
    """Return True if both exist, have the same bins and a design effect, and dropped no names without buckets."""
    if accepted is None or new is None or accepted["kind"] != new["kind"]:
        return False
    if "design_effect" not in accepted or "design_effect" not in new:
        return False
    is_whole = all(not side.get("others") or "buckets" in side for side in (accepted, new))
    return is_whole and accepted.get("edges") == new.get("edges")


def _psi(before: Floats, after: Floats) -> Floats:
    p, q = _floored(before), _floored(after)
    found: Floats = ((p - q) * np.log(p / q)).sum(axis=-1)
    return found


def _ks(before: Floats, after: Floats) -> Floats:
    apart = np.abs(np.cumsum(_shares(before), axis=-1) - np.cumsum(_shares(after), axis=-1))
    found: Floats = apart.max(axis=-1, initial=0.0)
    return found


def _shares(counts: Floats) -> Floats:
    found: Floats = counts / np.maximum(1.0, counts.sum(axis=-1, keepdims=True))
    return found


def _floored(counts: Floats) -> Floats:
    found: Floats = np.maximum(_shares(counts), 0.5 / np.maximum(1.0, counts.sum(axis=-1, keepdims=True)))
    return found
