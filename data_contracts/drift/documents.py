"""Design effect of rows that come in documents: the number of rows that are as informative as one independent row.

Questions on one page have words, lengths and a script in common. A column may name the page of each row. Without one,
pages are visible only if their rows are adjacent: neighboring values are then more often alike than distant ones.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Places = NDArray[np.int64]

_LENGTHS = (4, 16, 64, 256)  # rows per block; four times the largest effect at most
_MIN_PAIRS = 6  # smallest number of pairs of blocks of a length
_MIN_CHANGES = 16  # smallest number of changes of the value: fewer are not informative
_MAX_EFFECT = 64.0  # largest effect: drift must stay visible in a file whose order has another meaning
_BEYOND_AVERAGE = 1.6  # bins of few documents vary more than the average bin; measured in the tests
_DEVIATIONS = 4.0  # standard errors above 1 before an overdispersion counts
_DECIMALS = 4
_MOST_BINS = 1_024  # names beyond them share bins
_BEYOND_MEAN = 1.3  # as above, for named groups


def group_effect(places: Places, weights: Floats, groups: Places, *, is_ordered: bool) -> float:
    """Return the number of values that are as informative as one independent one: bins [N], weights [N], groups [N].

    It is the variance of the fractions p of bins between groups, which need not be adjacent, over that of independent
    values: Σ a V / Σ a p (1 - p) / n, with a = 1 / p, the mean effect of Rao & Scott 1984. Of an ordered column, the
    fractions below each bin count too, with a = 1, and the larger effect. One group is as informative as one value.
    """
    bins, names = (np.unique(each, return_inverse=True)[1] for each in (places % _MOST_BINS, groups))
    num_groups, num_bins = int(names.max(initial=-1)) + 1, int(bins.max(initial=-1)) + 1
    total = float(weights.sum())
    if num_groups <= 1 or num_bins <= 1:
        return max(1.0, total) if num_groups == 1 else 1.0
    counts = np.bincount(names * num_bins + bins, weights, minlength=num_groups * num_bins).reshape(num_groups, -1)
    sizes = counts.sum(axis=1, keepdims=True)

    def effect(sums: NDArray[Any], by_size: float) -> float:
        p = sums.sum(axis=0) / total
        between = ((sums - p * sizes) ** 2).sum(axis=0) * num_groups / (num_groups - 1) / total
        weight = p**-by_size
        return float((weight * between).sum() / max(float((weight * p * (1.0 - p)).sum()), 1e-12))

    below = effect(np.cumsum(counts, axis=1)[:, :-1], 0.0) if is_ordered else 1.0
    each = 1.0 + _BEYOND_MEAN * (effect(counts, 1.0) - 1.0)
    return round(min(max(1.0, each, below), total), _DECIMALS)


def design_effect(places: Places, weights: Floats) -> float:
    """Return the number of values, 1 to 64, that are as informative as one independent one: bins [N], weights [N].

    Neighboring blocks of 4 to 256 rows are compared. For independent values, Pearson's statistic of blocks against bins
    is about its degrees of freedom; documents multiply it by their number of values (overdispersion: McCullagh & Nelder
    1989, section 5.5). The largest significant factor of all lengths counts, and its excess over 1 counts half as much
    again. Because only neighbors are compared, concatenated sources, or a file sorted by another column, hardly look
    like documents. A column by which the file is sorted, or that changes fewer than 16 times, shows no documents; nor
    do scattered ones.
    """
    steps, longest = np.diff(places), len(places) // (2 * _MIN_PAIRS)
    if np.count_nonzero(steps) < _MIN_CHANGES or (steps >= 0).all() or (steps <= 0).all():
        return 1.0
    lengths = [length for length in {*_LENGTHS, longest} if _LENGTHS[0] <= length <= min(longest, _LENGTHS[-1])]
    largest = max((_overdispersion(length, places, weights) for length in lengths), default=1.0)
    return round(min(1.0 + _BEYOND_AVERAGE * (largest - 1.0), _MAX_EFFECT), _DECIMALS)


def _overdispersion(length: int, places: Places, weights: Floats) -> float:
    """Return Pearson's statistic of neighboring blocks against bins [N] over its degrees of freedom.

    1 if the excess may be chance.
    """
    whole = len(places) // (2 * length) * 2 * length
    places, weights, blocks = places[:whole], weights[:whole], np.arange(whole) // length
    pairs = blocks // 2
    bins = np.unique(pairs * (int(places.max()) + 1) + places, return_inverse=True)[1]
    of_block, of_bin, of_pair = (np.bincount(each, weights) for each in (blocks, bins, pairs))
    _, first, inverse = np.unique(blocks * len(of_bin) + bins, return_index=True, return_inverse=True)
    expected = of_block[blocks[first]] * of_bin[bins[first]] / of_pair[pairs[first]]
    statistic = float((np.bincount(inverse, weights) ** 2 / expected).sum() - weights.sum())  # other cells are empty
    freedom = len(of_bin) - len(of_pair)
    found = statistic / max(1, freedom) * (1.0 - 0.5 / length)  # the fractions of bins are those of the pair itself
    return found if freedom > 0 and found > 1.0 + _DEVIATIONS * math.sqrt(2.0 / freedom) else 1.0
