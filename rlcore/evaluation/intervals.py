"""Estimates with confidence intervals: accuracy, pass@k, win rate, calibration of a reward model."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlcore.errors import DataError, NonFiniteError

_RESAMPLES = 2_000
_CLUSTER_RESAMPLES = 1_000
_CHUNK_VALUES = 4_000_000  # resampled at a time: 32 MB


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """An estimate from ``n`` values and its confidence interval."""

    mean: float
    low: float
    high: float
    n: int


def with_bounds(name: str, interval: Interval) -> dict[str, float]:
    """Return an interval as three metrics: ``name``, ``name_low`` and ``name_high``."""
    return {name: interval.mean, f"{name}_low": interval.low, f"{name}_high": interval.high}


def accuracy(values: ArrayLike, *, clusters: ArrayLike | None = None, confidence: float = 0.95) -> Interval:
    """Return the fraction of right answers with its Wilson score interval (Wilson 1927).

    ``values`` [N] are 1 for right, 0 for wrong, 0.5 for a tie, which makes the interval slightly too wide. ``clusters``
    [N]: equal numbers for correlated values, such as those of one prompt; the interval then uses
    :func:`effective_sample_size`.

    Raises:
        DataError: No values, a value outside 0..1, or another number of clusters.
    """
    data = finite(values)
    if data.min() < 0.0 or data.max() > 1.0:
        raise DataError("a value is outside 0..1", fix="pass 1 for right and 0 for wrong per problem, 0.5 for a tie")
    mean, z = float(data.mean()), normal_quantile(confidence)
    n = float(len(data)) if clusters is None else effective_sample_size(data, clusters)
    centre = (mean + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * math.sqrt(mean * (1 - mean) / n + z**2 / (4 * n**2))
    # In exact arithmetic the interval contains the mean; rounding may exclude it at 0 and 1.
    low, high = min(max(centre - half, 0.0), mean), max(min(centre + half, 1.0), mean)
    return Interval(mean=mean, low=low, high=high, n=len(data))


def effective_sample_size(values: ArrayLike, clusters: ArrayLike) -> float:
    """Return the number of independent values with the same information on the mean as N values in clusters.

    N over the design effect (Kish 1965), ``C / (C - 1) · Σ_c (Σ_{i in c} (y_i - ȳ))² / Σ_i (y_i - ȳ)²``. The effect is
    at least 1 and at most ``Σ_c m_c² / N``, that of clusters of equal values (m_c: size of cluster c). If no value
    differs, it is that maximum, because the correlation is unknown.

    Raises:
        DataError: The numbers of clusters and values differ.
    """
    data, indices = finite(values), np.unique(np.asarray(clusters), return_inverse=True)[1]
    if indices.shape != data.shape:
        raise DataError(f"{len(indices)} clusters of {len(data)} values", fix="pass the cluster of each value")
    sizes, centred = np.bincount(indices), data - data.mean()
    single, alike = float((centred**2).sum()), float((sizes**2).sum()) / len(data)
    if len(sizes) == 1 or single < 1e-12:
        return len(data) / alike
    together = float((np.bincount(indices, weights=centred) ** 2).sum()) * len(sizes) / (len(sizes) - 1)
    return len(data) / min(max(together / single, 1.0), alike)


def pair_accuracy(margins: ArrayLike, *, prompts: ArrayLike | None = None, confidence: float = 0.95) -> Interval:
    """Return the fraction of pairs that a reward model ranks right, from margins ``r_chosen - r_rejected`` [P].

    A tie counts half. ``prompts`` [P]: prompt number of each pair, because pairs of one prompt are correlated.
    """
    return accuracy(np.heaviside(finite(margins), 0.5), clusters=prompts, confidence=confidence)


def dataset_accuracy(datasets: Sequence[str], correct: Sequence[bool]) -> dict[str, float]:
    """Return the accuracy on each dataset, as ``eval/data/<name>``; empty for a single dataset."""
    return _means("eval/data", zip(datasets, correct, strict=True)) if len(set(datasets)) > 1 else {}


def dataset_scores(
    datasets: Sequence[str], scores: Sequence[float | None], chosen: Collection[str]
) -> dict[str, float]:
    """Return the mean of the known scores on each of the chosen datasets, as ``eval/score/<name>``."""
    pairs = zip(datasets, scores, strict=True)
    known = ((name, score) for name, score in pairs if score is not None and not math.isnan(score))
    return _means("eval/score", ((name, score) for name, score in known if name in chosen))


def _means(prefix: str, pairs: Iterable[tuple[str, float]]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for name, value in pairs:
        values.setdefault(name, []).append(value)
    return {f"{prefix}/{name}": sum(each) / len(each) for name, each in values.items()}


def mean_fraction(values: ArrayLike, *, seed: int, confidence: float = 0.95) -> Interval:
    """Return the mean of [N] independent fractions with a percentile bootstrap interval (Efron 1979; 2,000 resamples).

    Resamples include two added values, 0 and 1, so that N equal values do not count as certainty: if all are 1, the
    interval starts at about 1 - 3.7 / N. Values of one problem are not independent: pass their mean.

    Raises:
        DataError: No values, or one outside 0..1.
        NonFiniteError: NaN or infinity.
    """
    data = finite(values)
    if data.min() < 0.0 or data.max() > 1.0:
        raise DataError("a fraction is outside 0..1", fix="pass one fraction per problem")
    means = _resampled_means(np.append(data, [0.0, 1.0]), np.random.default_rng(seed))
    return percentile_interval(means, float(data.mean()), n=len(data), confidence=confidence)


def percentile_interval(draws: NDArray[np.float64], mean: float, *, n: int, confidence: float) -> Interval:
    """Return the quantiles of finite draws of a statistic, widened to its value ``mean``; only that without draws."""
    low, high = np.quantile(draws, [(1 - confidence) / 2, (1 + confidence) / 2]) if len(draws) else (mean, mean)
    return Interval(mean=mean, low=min(float(low), mean), high=max(float(high), mean), n=n)


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Return the unbiased pass@k estimate: ``1 - C(n - c, k) / C(n, k)`` (Chen et al. 2021, eq. 1).

    Raises:
        DataError: Not ``0 <= num_correct <= num_samples`` and ``1 <= k <= num_samples``.
    """
    if not (0 <= num_correct <= num_samples and 1 <= k <= num_samples):
        raise DataError(f"pass@{k} of {num_correct} right in {num_samples} samples is not defined")
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def expected_calibration_error(margins: ArrayLike, *, num_bins: int = 10) -> float:
    """Return the expected calibration error of a reward model: ``Σ_bins fraction · |accuracy - confidence|`` in 0..1.

    The model predicts that the chosen answer wins with probability σ(margin), margins = r_chosen - r_rejected [P].
    Folded to the favoured side: confidence σ(|margin|) in ½..1, in bins of equal width; right if margin > 0, a tie
    counts half (Naeini et al. 2015).
    """
    data = finite(margins)
    confidence = 1.0 / (1.0 + np.exp(-np.abs(data)))
    right = np.heaviside(data, 0.5)
    bins = np.minimum(((confidence - 0.5) * 2 * num_bins).astype(int), num_bins - 1)
    gaps = np.bincount(bins, weights=right - confidence, minlength=num_bins)
    return float(np.abs(gaps).sum() / len(data))


def finite(values: ArrayLike) -> NDArray[np.float64]:
    """Return the values as float64 [N].

    Raises:
        DataError: No values, or not a list of values.
        NonFiniteError: NaN or infinity.
    """
    data = np.asarray(values, dtype=np.float64)
    if data.ndim != 1 or len(data) == 0:
        raise DataError(f"expected a list of values, got shape {data.shape}", fix="evaluate at least one problem")
    if not np.isfinite(data).all():
        raise NonFiniteError(f"{int((~np.isfinite(data)).sum())} of {len(data)} values are not finite")
    return data


def normal_quantile(confidence: float) -> float:
    """Return z of a two-sided interval: 1.96 for a ``confidence`` of 0.95.

    Raises:
        DataError: ``confidence`` is not between 0 and 1.
    """
    if not 0.0 < confidence < 1.0:
        raise DataError(f"confidence {confidence} is not between 0 and 1")
    return NormalDist().inv_cdf((1 + confidence) / 2)


def _resampled_means(data: NDArray[np.float64], generator: np.random.Generator) -> NDArray[np.float64]:
    n = len(data)
    chunk = max(1, _CHUNK_VALUES // n)
    sizes = [min(chunk, _RESAMPLES - start) for start in range(0, _RESAMPLES, chunk)]
    return np.concatenate([data[generator.integers(0, n, (size, n))].mean(axis=1) for size in sizes])


def cluster_bootstrap(
    statistic: Callable[[NDArray[np.int64]], float], clusters: NDArray[np.int64], *, seed: int, confidence: float = 0.95
) -> Interval:
    """Return a statistic of [N] rows with its percentile interval, resampling whole clusters (prompts).

    ``statistic`` is called with indices of rows. Resamples with a non-finite statistic are excluded.
    """
    different, index = np.unique(clusters, return_inverse=True)
    rows = np.split(np.argsort(index, kind="stable"), np.cumsum(np.bincount(index))[:-1])
    generator = np.random.default_rng(seed)
    draws = np.array(
        [
            statistic(np.concatenate([rows[each] for each in generator.integers(0, len(different), len(different))]))
            for _ in range(_CLUSTER_RESAMPLES)
        ]
    )
    mean = statistic(np.arange(len(clusters)))
    return percentile_interval(draws[np.isfinite(draws)], mean, n=len(clusters), confidence=confidence)
