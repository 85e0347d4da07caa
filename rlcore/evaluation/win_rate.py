"""Win rate of one model against another by a judge, and the audit of that judge on human pairs.

A judge compares each pair of answers in both orders. Results are from the first model's view: 1 for a win, 0 for a
loss, ½ for a tie, NaN for no result. The unit is the prompt: its preference is the mean of both orders, so a judge that
always prefers the first position gives ½.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlcore.config.answers import JudgeBounds
from rlcore.errors import DataError
from rlcore.evaluation.intervals import Interval, accuracy, cluster_bootstrap, mean_fraction, normal_quantile
from rlcore.evaluation.promotion import Check, check_max, check_min

Floats = NDArray[np.float64]
_PRIOR = 1e-2  # of φ: a normal prior with a standard deviation of 10 log-odds keeps the slope finite
_STEPS = 100
_LARGEST_STEP = 5.0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PairResults:
    """A judge's results on N pairs. ``forward`` [N]: with the first model's answer first; ``backward`` [N]: second.

    ``lengths`` [N] and ``other_lengths`` [N]: of the first model's answers and the other's, in characters.
    """

    forward: Floats
    backward: Floats
    lengths: Floats
    other_lengths: Floats

    @property
    def preferences(self) -> Floats:
        """Mean of both orders [N]; NaN if one of them is missing."""
        both: Floats = (self.forward + self.backward) / 2.0
        return both

    def judged(self) -> PairResults:
        """Return the pairs with a result in both orders.

        Raises:
            DataError: There are none.
        """
        kept = np.isfinite(self.preferences)
        if not kept.any():
            raise DataError(
                f"the judge returned no valid result for any of {len(kept)} pairs", fix="read the errors of the judge"
            )
        return self.take(kept)

    def take(self, rows: NDArray[np.bool_]) -> PairResults:
        """Return the selected pairs."""
        return PairResults(**{name: getattr(self, name)[rows] for name in self.__dataclass_fields__})


@dataclass(frozen=True, kw_only=True, slots=True)
class WinRate:
    """Win rate of the first model.

    Attributes:
        rate: Mean preference.
        length_controlled: Expected win rate at equal lengths.
        order_dependent: Fraction of pairs whose result changes with the order.
        first: Win rate of the first position, ½ without bias.
    """

    rate: Interval
    length_controlled: Interval
    order_dependent: Interval
    first: float
    wins: int
    ties: int
    losses: int


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgeAudit:
    """Results of a judge on held-out human pairs.

    Attributes:
        agreement: With the labels, a tie counting half.
        order_dependent, first: As in :class:`WinRate`.
        length_bias: How much more often than humans the judge prefers the longer answer.
        beyond_length: Agreement minus that of the rule "longer is better".
    """

    agreement: Interval
    order_dependent: Interval
    first: float
    length_bias: Interval
    beyond_length: Interval
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)


def win_rate(results: PairResults, *, seed: int, confidence: float = 0.95) -> WinRate:
    """Return the win rate of the first model over the prompts with results in both orders.

    ``rate`` has the percentile bootstrap interval over prompts (``mean_fraction``), which ties make narrower.

    Raises:
        DataError: No pair has a result.
    """
    kept = results.judged()
    values = kept.preferences
    return WinRate(
        rate=mean_fraction(values, seed=seed, confidence=confidence),
        length_controlled=length_controlled(values, kept.lengths, kept.other_lengths, confidence=confidence),
        order_dependent=accuracy(_differ(kept), confidence=confidence),
        first=_first(kept),
        wins=int((values > 0.5).sum()),
        ties=int((values == 0.5).sum()),
        losses=int((values < 0.5).sum()),
    )


def length_controlled(
    preferences: ArrayLike, lengths: ArrayLike, other_lengths: ArrayLike, *, confidence: float = 0.95
) -> Interval:
    """Return the win rate at equal lengths by logistic regression, from [N] prompts:

        logit E[y_i] = θ + φ tanh(Δ_i / s),   Δ_i = length - other length,   s = the standard deviation of Δ

    It is σ(θ): AlpacaEval 2 (Dubois et al. 2024, arXiv 2404.04475, eq. 2) without the difficulty of each instruction. y
    may be a fraction (Papke & Wooldridge 1996). φ has a wide normal prior, and two added prompts of equal lengths, one
    won and one lost, keep θ finite. The interval uses the sandwich estimate for θ.

    Raises:
        DataError: The numbers of lengths and preferences differ, or there are none.
    """
    y, own, other = (np.asarray(each, dtype=np.float64) for each in (preferences, lengths, other_lengths))
    if not len(y) or y.shape != own.shape or y.shape != other.shape:
        raise DataError(f"{y.shape} preferences for lengths of {own.shape} and {other.shape}")
    gap = own - other
    spread = float(gap.std())
    z = np.tanh(gap / spread) if spread > 0.0 else np.sign(gap)
    outcomes = np.append(y, [0.0, 1.0])
    features = np.stack([np.ones(len(y) + 2), np.append(z, [0.0, 0.0])], axis=1)
    weights, curvature = _fit(features, outcomes)
    scores = features * (outcomes - _sigmoid(features @ weights))[:, None]
    inverse = np.linalg.inv(curvature)
    n = len(outcomes)
    error = math.sqrt(float((inverse @ (scores.T @ scores) @ inverse)[0, 0]) * n / (n - 2))
    half = normal_quantile(confidence) * error
    mean, low, high = (float(_sigmoid(np.array(weights[0] + step))) for step in (0.0, -half, half))
    return Interval(mean=mean, low=low, high=high, n=len(y))


def audit_judge(
    results: PairResults, prompts: NDArray[np.int64], bounds: JudgeBounds, *, seed: int, confidence: float = 0.95
) -> JudgeAudit:
    """Audit a judge on held-out human pairs, with the human-preferred answer as the first model's.

    ``prompts`` [N]: prompt number of each pair. The length bias, over pairs of unequal lengths, is ``mean(judge prefers
    the longer) - mean(humans prefer the longer)``.

    Raises:
        DataError: No pair has a result.
    """
    rows = np.isfinite(results.preferences)
    kept, of_prompt = results.judged(), prompts[rows]
    values = kept.preferences
    agreement = accuracy(values, clusters=of_prompt, confidence=confidence)
    order = accuracy(_differ(kept), clusters=of_prompt, confidence=confidence)
    bias = _length_bias(kept, of_prompt, seed=seed, confidence=confidence)
    checks = (
        check_min(
            "agreement with humans",
            values.tolist(),
            bounds.min_agreement,
            clusters=of_prompt.tolist(),
            confidence=confidence,
        ),
        check_max("fraction of results that depend on the order", order.mean, bounds.max_position_bias),
        _unbiased(bias, bounds.max_length_bias),
    )
    return JudgeAudit(
        agreement=agreement,
        order_dependent=order,
        first=_first(kept),
        length_bias=bias,
        beyond_length=_beyond_length(kept, of_prompt, seed=seed, confidence=confidence),
        checks=checks,
    )


def _unbiased(bias: Interval, limit: float) -> Check:
    name = "preference for the longer answer beyond that of humans"
    if bias.n or limit >= 1.0:
        return check_max(name, bias.mean, limit)
    sentence = f"{name} is unknown: no human pair with a result has answers of different lengths"
    return replace(check_max(name, 1.0, limit), sentence=sentence)


def _differ(results: PairResults) -> NDArray[np.bool_]:
    winners = (np.sign(np.round(values - 0.5, 9)) for values in (results.forward, results.backward))
    return np.asarray(np.not_equal(*winners))


def _first(results: PairResults) -> float:
    return float((results.forward + 1.0 - results.backward).mean() / 2.0)


def _length_bias(results: PairResults, prompts: NDArray[np.int64], *, seed: int, confidence: float) -> Interval:
    unequal = results.lengths != results.other_lengths
    if not unequal.any():
        return Interval(mean=0.0, low=0.0, high=0.0, n=0)
    subset, is_longer = results.take(unequal), (results.lengths > results.other_lengths)[unequal]
    more = np.where(is_longer, subset.preferences, 1.0 - subset.preferences) - is_longer
    return cluster_bootstrap(lambda rows: float(more[rows].mean()), prompts[unequal], seed=seed, confidence=confidence)


def _beyond_length(results: PairResults, prompts: NDArray[np.int64], *, seed: int, confidence: float) -> Interval:
    by_length = np.heaviside(results.lengths - results.other_lengths, 0.5)
    more = results.preferences - by_length
    return cluster_bootstrap(lambda rows: float(more[rows].mean()), prompts, seed=seed, confidence=confidence)


def _fit(features: Floats, outcomes: Floats) -> tuple[Floats, Floats]:
    """Fit the penalised logistic regression; return the weights [2] and the curvature [2, 2]."""
    prior = np.diag([0.0, _PRIOR])
    weights = np.zeros(2)
    curvature = prior
    for _ in range(_STEPS):
        chances = _sigmoid(features @ weights)
        curvature = (features * (chances * (1.0 - chances))[:, None]).T @ features + prior
        step = np.linalg.solve(curvature, features.T @ (outcomes - chances) - prior @ weights)
        step *= min(1.0, _LARGEST_STEP / max(float(np.abs(step).max()), 1e-300))
        weights = weights + step
        if float(np.abs(step).max()) < 1e-10:
            break
    return weights, curvature


def _sigmoid(values: Floats) -> Floats:
    found: Floats = 1.0 / (1.0 + np.exp(-np.clip(values, -500.0, 500.0)))
    return found


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
