"""Figures with their uncertainty: accuracy, pass@k, win rate, calibration of a reward model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlcore.errors import DataError, NonFiniteError

_RESAMPLES = 2_000
_CHUNK_VALUES = 4_000_000  # resampled at a time: 32 MB


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """An estimate from ``n`` values and its confidence interval."""

    mean: float
    low: float
    high: float
    n: int


def accuracy(values: ArrayLike, *, clusters: ArrayLike | None = None, confidence: float = 0.95) -> Interval:
    """Share of right answers with its Wilson score interval (Wilson 1927).

    ``values`` [N] are verdicts, 1 right, 0 wrong, 0.5 a tie; the interval is then a little too wide, never too narrow.
    ``accuracy([1] * 8 + [0] * 2)`` is 0.8 [0.490, 0.943]. ``clusters`` [N]: values of one prompt, which go together,
    have the same number; the interval is then that of :func:`effective_sample_size`.

    Raises:
        DataError: no values, a value outside 0..1, or clusters of another number.
    """
    verdicts = finite(values)
    if verdicts.min() < 0.0 or verdicts.max() > 1.0:
        raise DataError("a verdict lies outside 0..1", fix="pass right or wrong per problem, 0.5 for a tie")
    mean, z = float(verdicts.mean()), _quantile(confidence)
    n = float(len(verdicts)) if clusters is None else effective_sample_size(verdicts, clusters)
    centre = (mean + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * math.sqrt(mean * (1 - mean) / n + z**2 / (4 * n**2))
    # In exact arithmetic the interval always holds the mean; rounding may leave it outside at 0 and 1.
    low, high = min(max(centre - half, 0.0), mean), max(min(centre + half, 1.0), mean)
    return Interval(mean=mean, low=low, high=high, n=len(verdicts))


def effective_sample_size(values: ArrayLike, clusters: ArrayLike) -> float:
    """Number of independent values that tell as much of the mean as these [N] in clusters [N] of m_c values each.

    N over the design effect (Kish 1965), the variance of the mean with whole clusters drawn over the variance with
    single values drawn: ``C / (C - 1) · Σ_c (Σ_{i in c} (y_i - ȳ))² / Σ_i (y_i - ȳ)²``, 1 at least, and at most that of
    clusters whose values are all alike, ``Σ_c m_c² / N``. Where no value differs, nothing tells whether those of a
    cluster go together, and it is the latter.

    Raises:
        DataError: another number of clusters than of values.
    """
    data, places = finite(values), np.unique(np.asarray(clusters), return_inverse=True)[1]
    if places.shape != data.shape:
        raise DataError(f"{len(places)} clusters of {len(data)} values", fix="give the cluster of each value")
    sizes, centred = np.bincount(places), data - data.mean()
    single, alike = float((centred**2).sum()), float((sizes**2).sum()) / len(data)
    if len(sizes) == 1 or single < 1e-12:
        return len(data) / alike
    together = float((np.bincount(places, weights=centred) ** 2).sum()) * len(sizes) / (len(sizes) - 1)
    return len(data) / min(max(together / single, 1.0), alike)


def pair_accuracy(margins: ArrayLike, *, prompts: ArrayLike | None = None, confidence: float = 0.95) -> Interval:
    """Share of pairs that a reward model ranks right, from margins ``r_chosen - r_rejected`` [P]; a tie counts half.

    ``prompts`` [P]: a number for the prompt of each pair, as pairs of one prompt go together (:func:`accuracy`).
    """
    return accuracy(np.heaviside(finite(margins), 0.5), clusters=prompts, confidence=confidence)


def dataset_accuracy(datasets: Sequence[str], correct: Sequence[bool]) -> dict[str, float]:
    """The share of right answers in each data set, as ``eval/data/<name>``; nothing where there is but one."""
    answers: dict[str, list[bool]] = {}
    for name, is_right in zip(datasets, correct, strict=True):
        answers.setdefault(name, []).append(is_right)
    return {f"eval/data/{name}": sum(each) / len(each) for name, each in answers.items()} if len(answers) > 1 else {}


def mean_share(values: ArrayLike, *, seed: int, confidence: float = 0.95) -> Interval:
    """Mean of [N] independent shares in 0..1 with a percentile bootstrap interval (Efron 1979; 2,000 resamples).

    Resamples are of the values and two imagined ones, 0 and 1, so that N equal values do not count as certainty: where
    all are 1, the interval begins at about 1 - 3.7 / N. Values of one problem are not independent: pass their mean.

    Raises:
        DataError: no values, or one outside 0..1.
        NonFiniteError: NaN or infinity.
    """
    data = finite(values)
    if data.min() < 0.0 or data.max() > 1.0:
        raise DataError("a share lies outside 0..1", fix="pass one share per problem")
    means = _resampled_means(np.append(data, [0.0, 1.0]), np.random.default_rng(seed))
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    mean = float(data.mean())
    return Interval(mean=mean, low=min(float(low), mean), high=max(float(high), mean), n=len(data))


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
    data = finite(margins)
    confidence = 1.0 / (1.0 + np.exp(-np.abs(data)))
    right = np.heaviside(data, 0.5)
    place = np.minimum(((confidence - 0.5) * 2 * num_bins).astype(int), num_bins - 1)
    gaps = np.bincount(place, weights=right - confidence, minlength=num_bins)
    return float(np.abs(gaps).sum() / len(data))


def finite(values: ArrayLike) -> NDArray[np.float64]:
    """The values as float64 [N].

    Raises:
        DataError: there are none, or not a list of them.
        NonFiniteError: NaN or infinity.
    """
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
