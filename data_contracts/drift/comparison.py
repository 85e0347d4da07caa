"""Distances between the sketches of a new dataset and those of the last accepted one, with limits.

    PSI = Σ_bins (p - q) ln(p / q)          population stability index (Siddiqi 2006, Credit Risk Scorecards)
    KS  = max_edges |P - Q|                 largest difference of the cumulative shares, over the edges of the bins

Chance alone makes PSI positive, by about (bins - 1)(1/n + 1/m) with n and m rows; that is taken off. A column has moved
when a distance is beyond its threshold *and* beyond what chance alone gives: the values of both datasets are dealt
anew into two heaps of the same sizes (permutation test; conditional on all values it needs no assumption but that they
were drawn one by one), and the distance must lie among the largest of those. Values that come in documents count as as
many as were drawn one by one (the design effect of a sketch). So the threshold says how much matters, and ``chance``
how often equal data are called moved, at every size and every number of names.

Names beyond the 50 that a sketch keeps are compared by buckets, into which they fall by a hash: both sides know the
whole count of a bucket. Few rows are compared in fewer buckets, as many as leave chance below what warns.
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
_ROWS_SQUARED = 2_000  # h² rows per bucket: √(2 buckets) · 3 / h, where chance ends, is then 0.1, where PSI warns
_SLACK = 1e-9  # equal distances differ by rounding; they are not beyond chance
_CHUNK_VALUES = 2_000_000  # dealt at a time: 16 MB


@dataclass(frozen=True, kw_only=True)
class DriftLimits:
    """The distances that warn and that refuse; ``chance``: how often chance alone may exceed its bound."""

    warn_psi: float = 0.1
    refuse_psi: float = 0.25
    warn_ks: float = 0.1
    refuse_ks: float = 0.25
    chance: float = 0.001


@dataclass(frozen=True, kw_only=True)
class Move:
    """The change of the share of one bin or name, in 0..1."""

    name: str
    before: float
    after: float


@dataclass(frozen=True, kw_only=True)
class ColumnDrift:
    """One column of two datasets. ``psi``: less what chance gives on average, not below 0. ``ks``: 0 for names.

    ``psi_by_chance`` and ``ks_by_chance``: what chance alone exceeds with the probability of the limits.
    ``before`` and ``after``: number of values counted. ``means`` of a histogram's column, before and after.
    ``moves``: the bins or names whose shares changed most, the largest change first. Where a sketch has cut a name, its
    share there is that of the smallest change that fits.
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
    """Every column that both have, the worst first; columns whose sketches were made otherwise are left out."""
    limits = limits or DriftLimits()
    shared = [name for name in accepted.keys() & new.keys() if _is_comparable(accepted[name], new[name])]
    found = [_judge_column(name, accepted[name], new[name], limits) for name in shared]
    return tuple(sorted(found, key=lambda one: (-_LEVELS.index(one.level), -one.psi, one.column)))


def not_compared(accepted: Mapping[str, Sketch], new: Mapping[str, Sketch]) -> tuple[str, ...]:
    """The columns that :func:`compare_columns` leaves out."""
    names = sorted(accepted.keys() | new.keys())
    return tuple(name for name in names if not _is_comparable(accepted.get(name), new.get(name)))


def worst_level(columns: tuple[ColumnDrift, ...]) -> Level:
    """The worst level of all columns; ``calm`` where there is none."""
    return max((one.level for one in columns), key=_LEVELS.index, default="calm")


def psi(before: Floats, after: Floats) -> float:
    """Population stability index of two rows of counts [B], as the formula has it; never negative.

    A bin that is empty on one side counts as half a row there, one that is empty on both sides as none.
    """
    is_filled = before + after > 0
    return float(_psi(before[is_filled], after[is_filled]))


def ks(before: Floats, after: Floats) -> float:
    """Largest difference of the cumulative shares of two rows of counts [B], in 0..1."""
    return float(_ks(before, after))


@dataclass(frozen=True, kw_only=True)
class Chance:
    """The distances between two samples of the same values: mean of PSI, and the quantiles of PSI and KS."""

    mean_psi: float
    psi: float
    ks: float


def by_chance(before: Floats, after: Floats, chance: float) -> Chance:
    """PSI and KS of two rows of counts [B] without drift: their values are dealt anew 2 / ``chance`` - 1 times.

    Dealt are whole values; fractions of counts are rounded so that their sums are kept. Infinite bounds where a side
    has no rows.
    """
    heaps = [np.diff(np.rint(np.cumsum(side)), prepend=0.0).astype(np.int64) for side in (before, after)]
    pooled, size = heaps[0] + heaps[1], min(int(heap.sum()) for heap in heaps)
    if not size:
        return Chance(mean_psi=0.0, psi=math.inf, ks=math.inf)
    pooled, deals = pooled[pooled > 0], math.ceil(2.0 / chance) - 1
    generator = np.random.default_rng(pooled.tolist())  # other data, other deals: no column is unlucky for ever
    chunk = max(1, _CHUNK_VALUES // len(pooled))
    of_psi, of_ks = np.empty(deals), np.empty(deals)
    for start in range(0, deals, chunk):
        part = slice(start, min(start + chunk, deals))
        dealt = generator.multivariate_hypergeometric(pooled, size, size=part.stop - start).astype(np.float64)
        of_psi[part], of_ks[part] = _psi(dealt, pooled - dealt), _ks(dealt, pooled - dealt)
    rank = -max(1, math.floor(chance * (deals + 1) + 1e-9))  # the data are one of deals + 1 that are equally likely
    return Chance(mean_psi=float(of_psi.mean()), psi=float(np.sort(of_psi)[rank]), ks=float(np.sort(of_ks)[rank]))


def num_buckets(before: float, after: float) -> int:
    """In how many buckets the names of ``before`` and ``after`` rows are compared: a power of two, 16 to 1,024."""
    half = before * after / max(1.0, before + after)
    return int(min(NUM_BUCKETS, max(_MIN_BUCKETS, 2 ** math.floor(math.log2(max(1.0, half**2 / _ROWS_SQUARED))))))


def _judge_column(name: str, accepted: Sketch, new: Sketch, limits: DriftLimits) -> ColumnDrift:
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
    """The counts of both in the same bins: those of the histogram, names where both have kept all, else buckets."""
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
    """Counts of all names by bucket [1,024], or of those alone that the sketch has kept by name."""
    if sketch["others"] and not kept_alone:
        return np.array(sketch["buckets"], dtype=np.float64)
    places = np.array([bucket_of(name) for name in sketch["counts"]], dtype=np.int64)
    return np.bincount(places, weights=list(sketch["counts"].values()), minlength=NUM_BUCKETS).astype(np.float64)


def _of_bins(edges: list[float], before: Floats, after: Floats) -> tuple[list[str], Floats, Floats]:
    """Bins of a histogram by their edges, and their shares in both."""
    texts = [f"{edge:g}" for edge in edges]
    between = [f"{low} to {high}" for low, high in pairwise(texts)]
    return [f"up to {texts[0]}", *between, f"above {texts[-1]}"], _shares(before), _shares(after)


def _of_names(accepted: Sketch, new: Sketch) -> tuple[list[str], Floats, Floats]:
    """Names that either has kept, and their shares in both."""
    names = sorted({*accepted["counts"], *new["counts"]})
    low, high = zip(*(_possible_shares(side, names) for side in (accepted, new)), strict=True)
    return names, np.clip(low[1], low[0], high[0]), np.clip(low[0], low[1], high[1])


def _possible_shares(sketch: Sketch, names: list[str]) -> tuple[Floats, Floats]:
    """Smallest and largest share of each name: of one that was cut, none, or all that its bucket has left.

    It is no more frequent than the rarest that was kept, either.
    """
    low = _named(sketch, names)
    left = np.maximum(_buckets(sketch) - _buckets(sketch, kept_alone=True), 0.0)
    rarest = min(sketch["counts"].values(), default=0)
    cut = np.minimum(left[[bucket_of(name) for name in names]], rarest)
    high = np.where([name in sketch["counts"] for name in names], low, cut)
    total = max(1.0, float(_buckets(sketch).sum()))
    return low / total, high / total


def _moves(labels: list[str], p: Floats, q: Floats) -> tuple[Move, ...]:
    """The three largest changes of shares [B]."""
    sizes = np.abs(q - p).round(9)  # equal changes differ by rounding; they keep the order of the bins
    order = np.argsort(-sizes, kind="stable").tolist()
    found = [Move(name=labels[place], before=float(p[place]), after=float(q[place])) for place in order[:3]]
    return tuple(move for move in found if move.before != move.after)


def _is_comparable(accepted: Sketch | None, new: Sketch | None) -> bool:
    """True if both are there, have the same bins and a design effect, and lost no names without their buckets."""
    if accepted is None or new is None or accepted["kind"] != new["kind"]:
        return False
    if "design_effect" not in accepted or "design_effect" not in new:
        return False
    is_whole = all(not side.get("others") or "buckets" in side for side in (accepted, new))
    return is_whole and accepted.get("edges") == new.get("edges")


def _psi(before: Floats, after: Floats) -> Floats:
    """PSI of counts [..., B]; an empty bin counts as half a row."""
    p, q = _floored(before), _floored(after)
    found: Floats = ((p - q) * np.log(p / q)).sum(axis=-1)
    return found


def _ks(before: Floats, after: Floats) -> Floats:
    """KS of counts [..., B]."""
    apart = np.abs(np.cumsum(_shares(before), axis=-1) - np.cumsum(_shares(after), axis=-1))
    found: Floats = apart.max(axis=-1, initial=0.0)
    return found


def _shares(counts: Floats) -> Floats:
    found: Floats = counts / np.maximum(1.0, counts.sum(axis=-1, keepdims=True))
    return found


def _floored(counts: Floats) -> Floats:
    found: Floats = np.maximum(_shares(counts), 0.5 / np.maximum(1.0, counts.sum(axis=-1, keepdims=True)))
    return found
