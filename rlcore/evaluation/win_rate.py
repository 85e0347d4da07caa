"""How often one model's answers are preferred to another's, and how far the judge who says so can be trusted.

A judge sees each pair of answers twice, in both orders. Verdicts are from the first model's view: 1 it won, 0 it lost,
½ a tie, NaN unjudged. The unit is the prompt: its preference is the mean of both orders, so a judge who always names
the answer in front gives ½.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlcore.config.win_rate import JudgeBounds
from rlcore.errors import DataError
from rlcore.evaluation.conditions import Check, check_max, check_min
from rlcore.evaluation.intervals import Interval, accuracy, mean_share
from rlcore.training.reward_calibration import cluster_bootstrap

Floats = NDArray[np.float64]
_PRIOR = 1e-2  # of φ: a normal prior with a standard deviation of 10 log-odds keeps a slope without an end finite
_STEPS = 100
_LARGEST_STEP = 5.0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PairResults:
    """What a judge said of N pairs. ``forward`` [N]: the first model's answer in front; ``backward`` [N]: behind.

    ``lengths`` [N] and ``other_lengths`` [N]: of the first model's answers and the other's, in characters.
    """

    forward: Floats
    backward: Floats
    lengths: Floats
    other_lengths: Floats

    @property
    def preferences(self) -> Floats:
        """The mean of both orders [N]; NaN where one of them is missing."""
        both: Floats = (self.forward + self.backward) / 2.0
        return both

    def judged(self) -> PairResults:
        """Those that have a verdict in both orders.

        Raises:
            DataError: there are none.
        """
        kept = np.isfinite(self.preferences)
        if not kept.any():
            raise DataError("the judge has judged no pair", fix="look at the errors beside the verdicts")
        return self.take(kept)

    def take(self, rows: NDArray[np.bool_]) -> PairResults:
        """Some of them."""
        fields = (self.forward, self.backward, self.lengths, self.other_lengths)
        forward, backward, lengths, other_lengths = (each[rows] for each in fields)
        return PairResults(forward=forward, backward=backward, lengths=lengths, other_lengths=other_lengths)


@dataclass(frozen=True, kw_only=True, slots=True)
class WinRate:
    """``rate``: the mean preference. ``length_controlled``: what it would be at equal length. ``order_dependent``: the
    share of pairs whose verdict changes with the order; ``first``: how often the answer in front wins, ½ without bias.
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
    """A judge on held-out human pairs. ``agreement``: with the labels, a tie counting half.

    ``length_bias``: how much more often than people the judge prefers the longer answer. ``agreement_when``: where the
    answer that people prefer is longer, or shorter. ``beyond_length``: its agreement less that of the rule that the
    longer answer is better. ``checks``: what it had to reach.
    """

    agreement: Interval
    order_dependent: Interval
    first: float
    length_bias: Interval
    agreement_when: dict[str, Interval]
    beyond_length: Interval
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Whether every check was."""
        return all(check.passed for check in self.checks)


def win_rate(verdicts: PairResults, *, seed: int, confidence: float = 0.95) -> WinRate:
    """The win rate of the first model, over the prompts that were judged in both orders.

    ``rate`` has the percentile bootstrap interval over prompts (``mean_share``), which ties make
    narrower, as they should.

    Raises:
        DataError: no pair was judged.
    """
    kept = verdicts.judged()
    values = kept.preferences
    return WinRate(
        rate=mean_share(values, seed=seed, confidence=confidence),
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
    """The win rate that a logistic regression expects at equal lengths, from [N] prompts:

        logit E[y_i] = θ + φ tanh(Δ_i / s),   Δ_i = length - other length,   s = the standard deviation of Δ

    It is σ(θ). This is the regression of AlpacaEval 2 (Dubois et al. 2024, arXiv 2404.04475, eq. 2) without its term
    for the difficulty of each instruction, which needs the verdicts on many models. y may be a fraction (Papke &
    Wooldridge 1996). φ has a wide normal prior, and two imagined prompts of equal lengths, one won and one lost, keep
    θ finite. The interval is the sandwich estimate's on θ. Where one model's answers are always longer, nothing is
    seen at equal lengths: the figure is then an extrapolation, and its interval is wide.

    Raises:
        DataError: other numbers of lengths than of preferences, or none.
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
    half = NormalDist().inv_cdf((1.0 + confidence) / 2.0) * error
    mean, low, high = (float(_sigmoid(np.array(weights[0] + step))) for step in (0.0, -half, half))
    return Interval(mean=mean, low=low, high=high, n=len(y))


def audit_judge(
    verdicts: PairResults, prompts: NDArray[np.int64], bounds: JudgeBounds, *, seed: int, confidence: float = 0.95
) -> JudgeAudit:
    """What a judge says of held-out human pairs, the answer that people prefer taken as the first model's.

    ``prompts`` [N]: a number for the prompt of each pair, as pairs of one prompt go together. The length bias is over
    the pairs of unequal lengths:

        mean(judge prefers the longer) - mean(people prefer the longer)

    ``beyond_length`` is over all pairs: the same pairs are judged by length alone, where equal lengths count half.

    Raises:
        DataError: no pair was judged.
    """
    rows = np.isfinite(verdicts.preferences)
    kept, of_prompt = verdicts.judged(), prompts[rows]
    values = kept.preferences
    agreement = accuracy(values, clusters=of_prompt, confidence=confidence)
    order = accuracy(_differ(kept), clusters=of_prompt, confidence=confidence)
    bias = _length_bias(kept, of_prompt, seed=seed, confidence=confidence)
    parts = {"longer": kept.lengths > kept.other_lengths, "shorter": kept.lengths < kept.other_lengths}
    checks = (
        check_min(
            "agreement with people",
            values.tolist(),
            bounds.min_agreement,
            clusters=of_prompt.tolist(),
            confidence=confidence,
        ),
        check_max("share of verdicts that depend on the order", order.mean, bounds.max_position_bias),
        _unbiased(bias, bounds.max_length_bias),
    )
    return JudgeAudit(
        agreement=agreement,
        order_dependent=order,
        first=_first(kept),
        length_bias=bias,
        agreement_when={
            name: accuracy(values[part], clusters=of_prompt[part], confidence=confidence)
            for name, part in parts.items()
            if part.any()
        },
        beyond_length=_beyond_length(kept, of_prompt, seed=seed, confidence=confidence),
        checks=checks,
    )


def _unbiased(bias: Interval, limit: float) -> Check:
    """True if a judge prefers longer answers no more than people do; not passed where no pair could show it."""
    name = "preference for the longer answer beyond that of people"
    if bias.n or limit >= 1.0:
        return check_max(name, bias.mean, limit)
    sentence = f"{name} is not known: no human pair that was judged has answers of different lengths"
    return replace(check_max(name, 1.0, limit), sentence=sentence)


def _differ(verdicts: PairResults) -> NDArray[np.bool_]:
    """Whether each pair is won by another answer when they change places; a graded verdict differs in its last bits."""
    winners = (np.sign(np.round(values - 0.5, 9)) for values in (verdicts.forward, verdicts.backward))
    return np.asarray(np.not_equal(*winners))


def _first(verdicts: PairResults) -> float:
    """How often the answer in front wins, a tie counting half."""
    return float((verdicts.forward + 1.0 - verdicts.backward).mean() / 2.0)


def _length_bias(verdicts: PairResults, prompts: NDArray[np.int64], *, seed: int, confidence: float) -> Interval:
    unequal = verdicts.lengths != verdicts.other_lengths
    if not unequal.any():
        return Interval(mean=0.0, low=0.0, high=0.0, n=0)
    part, is_longer = verdicts.take(unequal), (verdicts.lengths > verdicts.other_lengths)[unequal]
    more = np.where(is_longer, part.preferences, 1.0 - part.preferences) - is_longer
    return cluster_bootstrap(lambda rows: float(more[rows].mean()), prompts[unequal], seed=seed, confidence=confidence)


def _beyond_length(verdicts: PairResults, prompts: NDArray[np.int64], *, seed: int, confidence: float) -> Interval:
    by_length = np.heaviside(verdicts.lengths - verdicts.other_lengths, 0.5)
    more = verdicts.preferences - by_length
    return cluster_bootstrap(lambda rows: float(more[rows].mean()), prompts, seed=seed, confidence=confidence)


def _fit(features: Floats, outcomes: Floats) -> tuple[Floats, Floats]:
    """Newton's method on the penalised logistic loss: the weights [2], and its curvature there [2, 2]."""
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
