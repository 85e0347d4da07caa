"""Calibration of a reward model on held-out pairs, with intervals, and its length bias."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlcore.evaluation.intervals import Interval, cluster_bootstrap, expected_calibration_error, pair_accuracy

Floats = NDArray[np.float64]
NUM_BINS = 10
_LOG_TEMPERATURES = (-4.0, 4.0)  # 0.018 to 55: the optimum of a model that is always right is 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ReliabilityBin:
    """Pairs with certainty in ``low``..``high``: their number, mean certainty and accuracy."""

    low: float
    high: float
    num_pairs: int
    confidence: float
    accuracy: Interval


def reliability_table(
    margins: Floats, prompts: NDArray[np.int64], *, confidence: float = 0.95
) -> tuple[ReliabilityBin, ...]:
    """Return certainty σ(|margin|) of [P] pairs against accuracy, in ten bins of ½..1 without empty bins.

    ``prompts`` [P]: equal for pairs of one prompt, which form a cluster.
    """
    certainty = _sigmoid(np.abs(margins))
    index = np.minimum(((certainty - 0.5) * 2 * NUM_BINS).astype(int), NUM_BINS - 1)
    return tuple(
        ReliabilityBin(
            low=0.5 + 0.5 * number / NUM_BINS,
            high=0.5 + 0.5 * (number + 1) / NUM_BINS,
            num_pairs=int((index == number).sum()),
            confidence=float(certainty[index == number].mean()),
            accuracy=pair_accuracy(margins[index == number], prompts=prompts[index == number], confidence=confidence),
        )
        for number in np.unique(index).tolist()
    )


def brier_score(margins: Floats) -> float:
    """Return the mean squared error of the predicted probabilities: ``mean (1 - σ(margin))²`` (Brier 1950)."""
    return float(((1.0 - _sigmoid(margins)) ** 2).mean())


def fit_temperature(margins: Floats) -> float:
    """Return the T that minimizes ``mean -ln σ(margin / T)`` over [P] pairs (Guo et al. 2017).

    The loss is convex in 1/T, so golden-section search in ln T finds its only minimum between 0.018 and 55. A model
    that is right on all pairs gets the lower bound.
    """
    low, high = _LOG_TEMPERATURES
    ratio = (5**0.5 - 1) / 2

    def loss(log_temperature: float) -> float:
        return float(np.logaddexp(0.0, -margins * np.exp(-log_temperature)).mean())

    while high - low > 1e-6:
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, right) if loss(left) <= loss(right) else (left, high)
    return float(np.exp((low + high) / 2))


def calibration_interval(margins: Floats, prompts: NDArray[np.int64], *, seed: int, confidence: float) -> Interval:
    """Return the expected calibration error with a bootstrap interval. It is biased upwards by chance."""
    return cluster_bootstrap(
        lambda rows: expected_calibration_error(margins[rows]), prompts, seed=seed, confidence=confidence
    )


def correlation(first: Floats, second: Floats) -> float:
    """Return Pearson's correlation; 0 if either side does not vary."""
    x, y = first - first.mean(), second - second.mean()
    norm = float(np.sqrt((x @ x) * (y @ y)))
    return float(x @ y) / norm if norm > 1e-12 else 0.0


def within_groups(values: Floats, groups: NDArray[np.int64]) -> Floats:
    """Subtract the group mean from values [N]."""
    _, index = np.unique(groups, return_inverse=True)
    means = np.bincount(index, weights=values) / np.bincount(index)
    centered: Floats = values - means[index]
    return centered


def accuracy_by_length(
    margins: Floats, log_ratios: Floats, prompts: NDArray[np.int64], *, confidence: float = 0.95
) -> dict[str, Interval]:
    """Return pair accuracy by whether the chosen side is ``longer``, ``shorter`` or ``equal`` in tokens.

    ``prompts``: as in :func:`reliability_table`. Empty classes are omitted.
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
