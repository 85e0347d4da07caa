"""Rows that come in documents: how many of them tell as much as one that was drawn by itself.

Questions on one page have words, lengths and a script in common. Where they stand one after the other in a file, a
column shows it: values near each other are alike more often than values a little further on.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Places = NDArray[np.int64]

_LENGTHS = (4, 16, 64, 256)  # of blocks; four times the largest effect at most
_MIN_PAIRS = 6  # of blocks, that the longest ones leave
_MIN_CHANGES = 16  # of a value: fewer tell nothing
_MAX_EFFECT = 64.0  # drift must stay visible in a file whose order means something else
_BEYOND_AVERAGE = 1.6  # bins of few documents vary more than the average bin; measured in the tests
_DEVIATIONS = 4.0  # that an overdispersion lies above 1 before it counts
_DECIMALS = 4


def design_effect(places: Places, weights: Floats) -> float:
    """Number of values, 1 to 64, that tell as much as one drawn by itself: bins [N] in their order, weights [N].

    Neighbouring blocks of 4 to 256 rows are compared. If each value was drawn by itself, Pearson's statistic of blocks
    against bins is about its degrees of freedom; documents multiply it by their number of values (overdispersion:
    McCullagh & Nelder 1989, section 5.5). The largest factor of all lengths counts, where it is no accident, and what
    it has beyond 1 counts half as much again. Neighbours, so that one source after another, or a file that was sorted
    by something else, is next to no document. A column by which the file is sorted, or that changes fewer than 16
    times, says nothing of documents; nor do those that the file scatters.
    """
    steps, longest = np.diff(places), len(places) // (2 * _MIN_PAIRS)
    if np.count_nonzero(steps) < _MIN_CHANGES or (steps >= 0).all() or (steps <= 0).all():
        return 1.0
    lengths = [length for length in {*_LENGTHS, longest} if _LENGTHS[0] <= length <= min(longest, _LENGTHS[-1])]
    largest = max((_overdispersion(length, places, weights) for length in lengths), default=1.0)
    return round(min(1.0 + _BEYOND_AVERAGE * (largest - 1.0), _MAX_EFFECT), _DECIMALS)


def _overdispersion(length: int, places: Places, weights: Floats) -> float:
    """Pearson's statistic of blocks against bins [N] over its degrees of freedom, each pair of blocks by itself.

    1 where it may be an accident.
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
    found = statistic / max(1, freedom) * (1.0 - 0.5 / length)  # the bins' shares are those of the pair itself
    return found if freedom > 0 and found > 1.0 + _DEVIATIONS * math.sqrt(2.0 / freedom) else 1.0
