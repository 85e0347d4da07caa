"""Paired fractions: the change of a fraction on the same problems, and exact tests that rule out a loss.

Of N problems ``won`` are those that only the new model solves, ``lost`` those that only the old one solves. The change
of the fraction is Δ = (won - lost) / N. Tango's score statistic (1998, Statistics in Medicine 17) compares it with a
hypothetical Δ, under the most likely probabilities with this Δ:

    T(Δ) = (won - lost - N Δ) / √(N (2 q + Δ (1 - Δ))),   q = the likeliest probability of "only the old one" given Δ

With no difference in five problems a loss of 0.43 stays possible, while a bootstrap interval would be exactly 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import bdtr, betaincinv, gammaln

from rlcore.errors import DataError
from rlcore.evaluation.intervals import Interval, finite, normal_quantile

Floats = NDArray[np.float64]
_MIN_GRID, _GRID_PER_ROOT = 64, 6  # grid for the maximum of the p value, whose peaks are 1 / √n wide
_NUM_FINER, _ROUNDS = 9, 2  # refinements between the neighbours of the largest value
_SPREADS = 8.0  # counts further from their mean than this number of standard deviations, plus ten, are ignored
_STEPS = 60  # of a bisection: to the last bit


@dataclass(frozen=True, kw_only=True, slots=True)
class PairedDifference:
    """Mean difference on the same problems, and the p value of no difference (exact McNemar test, two-sided)."""

    difference: Interval
    p_value: float


def paired_difference(new: ArrayLike, old: ArrayLike, *, confidence: float = 0.95) -> PairedDifference:
    """Compare 0/1 results of two models on the same [N] problems, in the same order.

    The interval is that of Tango's score statistic for pairs, so the difficulty of a problem cancels.

    Raises:
        DataError: Different lengths, no values, or a value that is not 0 or 1.
    """
    first, second = finite(new), finite(old)
    if first.shape != second.shape:
        raise DataError(f"{len(first)} values against {len(second)}", fix="evaluate both on the same problems")
    if not np.isin(np.concatenate([first, second]), (0.0, 1.0)).all():
        raise DataError("a value is neither 0 nor 1", fix="pass 1 for right and 0 for wrong per problem")
    won, lost, n = int((first > second).sum()), int((first < second).sum()), len(first)
    low, high = score_interval(won, lost, n, confidence=confidence)
    difference = Interval(mean=(won - lost) / n, low=low, high=high, n=n)
    return PairedDifference(difference=difference, p_value=mcnemar_p(won, lost))


def mcnemar_p(only_new: int, only_old: int) -> float:
    """Return the p value of the two-sided exact McNemar test (McNemar 1947).

    Without a difference each problem that only one system solves is a fair coin: ``2 · P(Binomial(n, ½) <= min)``, at
    most 1.
    """
    return min(1.0, 2.0 * float(bdtr(min(only_new, only_old), only_new + only_old, 0.5)))


def score_interval(won: int, lost: int, n: int, *, confidence: float = 0.95) -> tuple[float, float]:
    """Return the Δ that the score statistic does not reject, in -1..1; the interval contains ``(won - lost) / n``.

    Raises:
        DataError: Impossible counts, or a confidence outside (0, 1).
    """
    _check(won, lost, n)
    z, change = normal_quantile(confidence), (won - lost) / n
    return _edge(won, lost, n, (-1.0, change), z), -_edge(lost, won, n, (-1.0, -change), z)


@lru_cache(maxsize=8192)
def noninferiority_p(won: int, lost: int, n: int, margin: float) -> float:
    """Return the exact p value of "the fraction has dropped by ``margin`` or more".

    It is the probability of a score statistic at least as high if the loss is exactly ``margin``
    (:func:`chance_of_score`). At a margin of 0 the statistic is McNemar's, and this is the exact unconditional test of
    "better" (Suissa & Shuster 1991), which keeps its level for problems drawn independently of each other.

    Raises:
        DataError: Impossible counts, or a margin outside 0..1.
    """
    _check(won, lost, n)
    if not 0.0 <= margin <= 1.0:
        raise DataError(f"a margin of {margin:g} is not in 0..1")
    if margin == 1.0:
        return float(lost == n)  # a loss of 1 means that every problem was lost
    return chance_of_score(float(_score(won, lost, n, -margin)), n, margin)


def chance_of_score(observed: float, n: int, margin: float) -> float:
    """Return the probability of a score statistic of ``observed`` or more from ``n`` problems at a loss ``margin`` < 1.

    It is the maximum over all probabilities q of "only the old one" (unconditional exact test; Lloyd & Moldovan 2008),
    on a grid of even steps of arcsin √. A grid ten times as fine finds no maximum that is larger by 1e-5.
    """
    needed = _needed(observed, n, margin)
    size = max(_MIN_GRID, math.ceil(_GRID_PER_ROOT * math.sqrt(n)))
    chances = margin + np.sin(np.linspace(1e-4, np.pi / 2.0, size)) ** 2 * (1.0 - margin) / 2.0  # denser at the ends
    largest = 0.0
    for _ in range(1 + _ROUNDS):
        tails = [_tail(needed, n, float(q), margin) for q in chances]
        best = int(np.argmax(tails))
        largest = max(largest, tails[best])
        chances = np.linspace(chances[max(best - 1, 0)], chances[min(best + 1, len(chances) - 1)], _NUM_FINER)
    return min(1.0, largest)


def min_sample_size(margin: float, alpha: float) -> int:
    """Return the smallest number of problems that can rule out a loss of ``margin`` at ``alpha``.

    ``(1 - margin)^n <= alpha``: with fewer, even a model that loses no problem fails.
    """
    return math.ceil(math.log(alpha) / math.log1p(-margin)) if 0.0 < margin < 1.0 else 1


def fraction_lower_bound(right: int, n: int, alpha: float) -> float:
    """Return the lower confidence bound at ``alpha`` of a fraction (Clopper & Pearson 1934); 0 for no right answer.

    It is the fraction at which ``right`` or more of ``n`` have the probability ``alpha``.
    """
    _check(right, 0, n)
    if right == 0:
        return 0.0
    return float(betaincinv(right, n - right + 1, alpha))


def _check(won: int, lost: int, n: int) -> None:
    if min(won, lost) < 0 or n < 1 or won + lost > n:
        raise DataError(f"{won} won and {lost} lost of {n} problems is not possible", fix="evaluate at least one")


def _score(won: ArrayLike, lost: ArrayLike, n: int, change: ArrayLike) -> Floats:
    w, b, d = (np.asarray(each, dtype=np.float64) for each in (won, lost, change))
    linear = (2 * n - w + b) * d - (w + b)
    root = np.sqrt(np.maximum(linear**2 + 8 * n * b * d * (1 - d), 0.0))
    variance = n * ((root - linear) / (2 * n) + d * (1 - d))
    found: Floats = np.where(variance > 1e-9, (w - b - n * d) / np.sqrt(np.maximum(variance, 1e-9)), 0.0)
    return found


def _edge(won: int, lost: int, n: int, bounds: tuple[float, float], z: float) -> float:
    """Return the Δ at which T falls to ``z``, between a rejected change and the estimate."""
    low, high = bounds
    for _ in range(_STEPS):
        middle = (low + high) / 2.0
        low, high = (middle, high) if _score(won, lost, n, middle) > z else (low, middle)
    return low


def _needed(observed: float, n: int, margin: float) -> NDArray[np.int64]:
    """Return for each number lost, 0..n, the smallest number won with T >= ``observed``; n + 1 if none has."""
    lost = np.arange(n + 1)
    low, high = np.zeros(n + 1, dtype=np.int64), n - lost + 1
    while (low < high).any():
        middle = (low + high) // 2
        is_enough = _score(middle, lost, n, -margin) >= observed - 1e-9
        low, high = np.where(is_enough, low, np.minimum(middle + 1, high)), np.where(is_enough, middle, high)
    return np.where(low > n - lost, n + 1, low)


def _tail(needed: NDArray[np.int64], n: int, q: float, margin: float) -> float:
    """Return P(won >= needed(lost)); ``q``: probability of "only the old one", ``q - margin``: of "only the new"."""
    chances = np.array([q - margin, q, max(1.0 - 2.0 * q + margin, 0.0)])
    (first_won, last_won), (first_lost, last_lost) = (_likely(n, chance) for chance in chances[:2].tolist())
    won, lost = np.arange(first_won, last_won)[None, :], np.arange(first_lost, last_lost)[:, None]
    neither = n - won - lost
    with np.errstate(divide="ignore"):
        logs = np.log(np.maximum(chances, 1e-300))
    factorials = _log_factorials(n)
    logarithm = factorials[n] - factorials[won] - factorials[lost] - factorials[np.maximum(neither, 0)]
    logarithm = logarithm + won * logs[0] + lost * logs[1] + neither * logs[2]
    is_counted = (won >= needed[lost]) & (neither >= 0)
    return float(np.exp(logarithm[is_counted]).sum())


@lru_cache(maxsize=64)
def _log_factorials(n: int) -> Floats:
    found: Floats = gammaln(np.arange(n + 1) + 1.0)
    return found


def _likely(n: int, chance: float) -> tuple[int, int]:
    middle, reach = n * chance, _SPREADS * math.sqrt(n * chance * (1.0 - chance)) + 10.0
    return max(0, math.floor(middle - reach)), min(n, math.ceil(middle + reach)) + 1
