"""Dependence of a judge on a reward model that trained the policy, measured on held-out human pairs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlcore.errors import DataError
from rlcore.evaluation.intervals import Interval, accuracy, cluster_bootstrap
from rlcore.evaluation.win_rate import PairResults


@dataclass(frozen=True, kw_only=True, slots=True)
class Dependence:
    """Agreement of a judge with a reward model of the policy, on held-out human pairs.

    Attributes:
        agreement: Fraction of pairs on which both prefer the same answer, a tie counting half.
        excess: 1 - disagreement / that of independent errors: 0 for independent errors, 1 for equal models.
    """

    agreement: Interval
    excess: Interval


def dependence(
    judge: PairResults, reward: PairResults, prompts: NDArray[np.int64], *, seed: int, confidence: float = 0.95
) -> Dependence:
    """Measure how far a judge and a reward model are right on the same human pairs.

    With accuracies a and b, independent errors make them disagree on a (1 - b) + b (1 - a) of the pairs. If neither
    errs, that is 0, and so is the excess: these pairs show no dependence.

    Raises:
        DataError: No pair has a result of both.
    """
    own, other = judge.preferences, reward.preferences
    known = np.isfinite(own + other)
    own, other = own[known], other[known]
    if not len(own):
        raise DataError("no human pair has a result of both judge and reward model", fix="read the errors of the judge")

    def excess(rows: NDArray[np.int64]) -> float:
        a, b = float(own[rows].mean()), float(other[rows].mean())
        expected = a * (1.0 - b) + b * (1.0 - a)
        return 1.0 - float(np.abs(own - other)[rows].mean()) / expected if expected else 0.0

    agreement = accuracy(1.0 - np.abs(own - other), clusters=prompts[known], confidence=confidence)
    return Dependence(
        agreement=agreement,
        excess=cluster_bootstrap(excess, prompts[known], seed=seed, confidence=confidence),
    )
