"""What a reward model is worth on held-out pairs: calibration with its uncertainty, and how much of it is length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlcore.evaluation.intervals import Interval, expected_calibration_error, pair_accuracy

Floats = NDArray[np.float64]
NUM_BINS = 10
_RESAMPLES = 1_000
_LOG_TEMPERATURES = (-4.0, 4.0)  # 0.018 to 55: a model that is always right would ask for 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ReliabilityBin:
    """Pairs whose stated certainty lies in ``low``..``high``: their number, mean certainty and hit rate."""

    low: float
    high: float
    num_pairs: int
    confidence: float
    accuracy: Interval


def reliability_table(
    margins: Floats, prompts: NDArray[np.int64], *, confidence: float = 0.95
) -> tuple[ReliabilityBin, ...]:
    """Certainty σ(|margin|) of [P] pairs against hit rate, in ten bins of ½..1; empty bins are left out.

    ``prompts`` [P]: a number for the prompt of each pair; pairs of one prompt go together.
    """
    certainty = _sigmoid(np.abs(margins))
    place = np.minimum(((certainty - 0.5) * 2 * NUM_BINS).astype(int), NUM_BINS - 1)
    return tuple(
        ReliabilityBin(
            low=0.5 + 0.5 * number / NUM_BINS,
            high=0.5 + 0.5 * (number + 1) / NUM_BINS,
            num_pairs=int((place == number).sum()),
            confidence=float(certainty[place == number].mean()),
            accuracy=pair_accuracy(margins[place == number], prompts=prompts[place == number], confidence=confidence),
        )
        for number in np.unique(place).tolist()
    )


def brier_score(margins: Floats) -> float:
    """Mean squared error of the stated chance that the chosen side wins: ``mean (1 - σ(margin))²`` (Brier 1950)."""
    return float(((1.0 - _sigmoid(margins)) ** 2).mean())


def fit_temperature(margins: Floats) -> float:
    """The T with the smallest ``mean -ln σ(margin / T)`` over [P] pairs (Guo et al. 2017), by golden section in ln T.

    The loss is convex in 1/T, so it has one minimum in ln T. Between 0.018 and 55; a model that is right on every pair
    gets the lower bound, as its margins cannot say how often it would be wrong.
    """
    low, high = _LOG_TEMPERATURES
    ratio = (5**0.5 - 1) / 2

    def loss(log_temperature: float) -> float:
        return float(np.logaddexp(0.0, -margins * np.exp(-log_temperature)).mean())

    while high - low > 1e-6:
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, right) if loss(left) <= loss(right) else (left, high)
    return float(np.exp((low + high) / 2))


def cluster_bootstrap(
    statistic: Callable[[NDArray[np.int64]], float], clusters: NDArray[np.int64], *, seed: int, confidence: float = 0.95
) -> Interval:
    """A figure of [N] rows with its percentile interval; whole clusters (prompts) are drawn, as their rows go together.

    ``statistic`` gets the places of the drawn rows. Draws for which it is not finite are left out.
    """
    different, place = np.unique(clusters, return_inverse=True)
    rows = np.split(np.argsort(place, kind="stable"), np.cumsum(np.bincount(place))[:-1])
    generator = np.random.default_rng(seed)
    draws = [
        statistic(np.concatenate([rows[each] for each in generator.integers(0, len(different), len(different))]))
        for _ in range(_RESAMPLES)
    ]
    finite = [draw for draw in draws if np.isfinite(draw)]
    mean = statistic(np.arange(len(clusters)))
    low, high = np.quantile(finite, [(1 - confidence) / 2, (1 + confidence) / 2]) if finite else (mean, mean)
    return Interval(mean=mean, low=min(float(low), mean), high=max(float(high), mean), n=len(clusters))


def calibration_interval(margins: Floats, prompts: NDArray[np.int64], *, seed: int, confidence: float) -> Interval:
    """Expected calibration error with its bootstrap interval. Chance alone makes it positive: it is biased upwards."""
    return cluster_bootstrap(
        lambda rows: expected_calibration_error(margins[rows]), prompts, seed=seed, confidence=confidence
    )


def correlation(first: Floats, second: Floats) -> float:
    """Pearson's correlation; 0 where one of the two does not vary."""
    x, y = first - first.mean(), second - second.mean()
    norm = float(np.sqrt((x @ x) * (y @ y)))
    return float(x @ y) / norm if norm > 1e-12 else 0.0


def within_groups(values: Floats, groups: NDArray[np.int64]) -> Floats:
    """Values [N] less the mean of their group."""
    _, place = np.unique(groups, return_inverse=True)
    means = np.bincount(place, weights=values) / np.bincount(place)
    centred: Floats = values - means[place]
    return centred


def accuracy_by_length(
    margins: Floats, log_ratios: Floats, prompts: NDArray[np.int64], *, confidence: float = 0.95
) -> dict[str, Interval]:
    """Pair accuracy where the chosen side is ``longer``, ``shorter`` or ``equal`` in tokens; without empty parts.

    ``prompts`` [P]: a number for the prompt of each pair; pairs of one prompt go together.
    """
    parts = {"longer": log_ratios > 0.0, "shorter": log_ratios < 0.0, "equal": log_ratios == 0.0}
    return {
        name: pair_accuracy(margins[part], prompts=prompts[part], confidence=confidence)
        for name, part in parts.items()
        if part.any()
    }


def _sigmoid(values: Floats) -> Floats:
    folded: Floats = np.exp(-np.logaddexp(0.0, -values))
    return folded
