"""Figures with their uncertainty: accuracy, pass@k, win rate, paired differences, calibration of a reward model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlcore.errors import DataError, NonFiniteError

_RESAMPLES = 2_000
_CHUNK_VALUES = 4_000_000  # resampled at a time: 32 MB


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """An estimate from ``n`` independent values and its confidence interval."""

    mean: float
    low: float
    high: float
    n: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PairedDifference:
    """Mean difference on the same problems, and the p value of no difference (exact McNemar test, two-sided)."""

    difference: Interval
    p_value: float


def accuracy(values: ArrayLike, *, confidence: float = 0.95) -> Interval:
    """Share of right answers with its Wilson score interval (Wilson 1927).

    ``values`` [N] are verdicts, 1 right, 0 wrong, 0.5 a tie; the interval is then a little too wide, never too narrow.
    ``accuracy([1] * 8 + [0] * 2)`` is 0.8 [0.490, 0.943].

    Raises:
        DataError: no values, or a value outside 0..1.
    """
    verdicts = _finite(values)
    if verdicts.min() < 0.0 or verdicts.max() > 1.0:
        raise DataError("a verdict lies outside 0..1", fix="pass right or wrong per problem, 0.5 for a tie")
    n, mean = len(verdicts), float(verdicts.mean())
    z = _quantile(confidence)
    centre = (mean + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * math.sqrt(mean * (1 - mean) / n + z**2 / (4 * n**2))
    # In exact arithmetic the interval always holds the mean; rounding may leave it outside at 0 and 1.
    return Interval(mean=mean, low=min(max(centre - half, 0.0), mean), high=max(min(centre + half, 1.0), mean), n=n)


def win_rate(outcomes: ArrayLike, *, confidence: float = 0.95) -> Interval:
    """Share of comparisons won, a tie counting half: outcomes [N] of 1, 0.5 and 0. See :func:`accuracy`."""
    return accuracy(outcomes, confidence=confidence)


def pair_accuracy(margins: ArrayLike, *, confidence: float = 0.95) -> Interval:
    """Share of pairs that a reward model ranks right, from margins ``r_chosen - r_rejected`` [P]; a tie counts half."""
    return accuracy(np.heaviside(_finite(margins), 0.5), confidence=confidence)


def bootstrap_mean(values: ArrayLike, *, seed: int, confidence: float = 0.95) -> Interval:
    """Mean of [N] independent values with its percentile bootstrap interval (Efron 1979; 2,000 resamples).

    Values of one problem are not independent: pass one value per problem.

    Raises:
        DataError: no values.
        NonFiniteError: NaN or infinity.
    """
    data = _finite(values)
    means = _resampled_means(data, np.random.default_rng(seed))
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(mean=float(data.mean()), low=float(low), high=float(high), n=len(data))


def paired_difference(new: ArrayLike, old: ArrayLike, *, seed: int, confidence: float = 0.95) -> PairedDifference:
    """Whether ``new`` is right more often than ``old`` on the same [N] problems, in the same order.

    Bootstrap over problems, so that what makes a problem hard for both cancels.

    Raises:
        DataError: different lengths, no values, or a value that is neither right nor wrong.
    """
    first, second = _finite(new), _finite(old)
    if first.shape != second.shape:
        raise DataError(f"{len(first)} values against {len(second)}", fix="evaluate both on the same problems")
    if not np.isin(np.concatenate([first, second]), (0.0, 1.0)).all():
        raise DataError("a verdict is neither 0 nor 1", fix="pass right or wrong per problem")
    difference = bootstrap_mean(first - second, seed=seed, confidence=confidence)
    return PairedDifference(
        difference=difference,
        p_value=mcnemar_p(int((first > second).sum()), int((first < second).sum())),
    )


def mcnemar_p(only_new: int, only_old: int) -> float:
    """Two-sided exact McNemar test: problems that only one of two systems solves (McNemar 1947).

    Under no difference each such problem is a fair coin: ``2 · P(Binomial(n, ½) <= min)``, at most 1.
    """
    n = only_new + only_old
    tail = term = 1  # the sum of C(n, i), and its last term
    for i in range(min(only_new, only_old)):
        term = term * (n - i) // (i + 1)
        tail += term
    return min(1.0, float(Fraction(2 * tail, 1 << n)))  # integers divide exactly at any size


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased chance that one of ``k`` samples is right: ``1 - C(n - c, k) / C(n, k)`` (Chen et al. 2021, eq. 1).

    Raises:
        DataError: not ``0 <= num_correct <= num_samples`` and ``1 <= k <= num_samples``.
    """
    if not (0 <= num_correct <= num_samples and 1 <= k <= num_samples):
        raise DataError(f"pass@{k} of {num_correct} right in {num_samples} samples is not defined")
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def expected_calibration_error(margins: ArrayLike, *, num_bins: int = 10) -> float:
    """How far a reward model's certainty is from its hit rate: ``Σ_bins share · |accuracy - confidence|`` in 0..1.

    The model says "chosen wins" with probability σ(margin), margins = r_chosen - r_rejected [P]. Folded to the side it
    favours: confidence σ(|margin|) in ½..1, in bins of equal width; right where margin > 0, a tie counts half
    (Naeini et al. 2015).
    """
    data = _finite(margins)
    confidence = 1.0 / (1.0 + np.exp(-np.abs(data)))
    right = np.heaviside(data, 0.5)
    place = np.minimum(((confidence - 0.5) * 2 * num_bins).astype(int), num_bins - 1)
    gaps = np.bincount(place, weights=right - confidence, minlength=num_bins)
    return float(np.abs(gaps).sum() / len(data))


def _finite(values: ArrayLike) -> NDArray[np.float64]:
    data = np.asarray(values, dtype=np.float64)
    if data.ndim != 1 or len(data) == 0:
        raise DataError(f"figures need a list of values, not shape {data.shape}", fix="evaluate at least one problem")
    if not np.isfinite(data).all():
        raise NonFiniteError(f"{int((~np.isfinite(data)).sum())} of {len(data)} values are not finite")
    return data


def _quantile(confidence: float) -> float:
    if not 0.0 < confidence < 1.0:
        raise DataError(f"confidence {confidence} is not between 0 and 1")
    return NormalDist().inv_cdf((1 + confidence) / 2)


def _resampled_means(data: NDArray[np.float64], generator: np.random.Generator) -> NDArray[np.float64]:
    n = len(data)
    chunk = max(1, _CHUNK_VALUES // n)
    sizes = [min(chunk, _RESAMPLES - start) for start in range(0, _RESAMPLES, chunk)]
    return np.concatenate([data[generator.integers(0, n, (size, n))].mean(axis=1) for size in sizes])
