"""Promotion gate: decide from both models' results on the same prompts whether a challenger replaces the champion.

Guarantee: for one version of the held-out prompts, the probability that *any* model that is no better than its champion
is ever promoted is at most ``alpha``, for any number of candidates and any dependence between them:

    look t (1, 2, …) tests at ``alpha_t = alpha / (t (t + 1))``, and Σ_t alpha_t = alpha   (union bound)

Every guard must pass at ``alpha_t`` too, without further correction, because a promotion needs all of them
(intersection-union test, Berger 1982): exactly for binary metrics, up to the accuracy of the bootstrap for others. The
caller counts the looks at one set of prompts; new prompts start at look 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlcore.errors import DataError, NonFiniteError
from rlcore.evaluation.intervals import accuracy, effective_sample_size, finite
from rlcore.evaluation.paired_tests import fraction_lower_bound, min_sample_size, noninferiority_p, score_interval
from rlcore.seeding import derive_seed

Values = NDArray[np.float64]
_RESAMPLES_OVER_ALPHA = 50  # so that about 50 resamples are beyond the interval's end
_MAX_RESAMPLES = 50_000  # p values are at least 1 / 50,001, so from look 50 no guard can pass at alpha = 0.05
_CHUNK_VALUES = 4_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One condition of a promotion.

    ``estimate`` with its interval is compared with ``limit``; of a pair it is challenger minus champion. The interval
    has confidence ``1 - 2 alpha_t``, so each end is a bound at ``alpha_t``. ``p_value`` is one-sided, None without a
    test.
    """

    name: str
    estimate: float
    low: float
    high: float
    p_value: float | None
    limit: float
    passed: bool
    sentence: str


def check_min(
    name: str,
    values: Sequence[float],
    limit: float,
    *,
    clusters: Sequence[int] | None = None,
    confidence: float = 0.95,
) -> Check:
    """Check that the lower end of a fraction's exact interval reaches ``limit``, for scores [N] in 0..1 of one model.

    A true fraction of exactly ``limit`` passes with probability at most (1 - ``confidence``) / 2: exactly for
    independent values; for ``clusters``, as in ``accuracy``, in simulations. The upper end is Wilson's.
    """
    fraction = accuracy(values, clusters=clusters, confidence=confidence)
    n = fraction.n if clusters is None else math.floor(_conservative_sample_size(values, clusters) + 1e-9)
    low = fraction_lower_bound(math.floor(fraction.mean * n + 1e-9), n, (1.0 - confidence) / 2.0)
    passed = low >= limit
    sentence = f"{name} is at least {low:.3f}, {'which reaches' if passed else 'which does not reach'} {limit:g}"
    bounds = {"estimate": fraction.mean, "low": low, "high": fraction.high}
    return Check(name=name, **bounds, p_value=None, limit=limit, passed=passed, sentence=sentence)


def _conservative_sample_size(values: Sequence[float], clusters: Sequence[int]) -> float:
    """Return ``effective_sample_size`` with one more cluster: of the largest size, with all values wrong.

    Few wrong values cannot show that values of a cluster are correlated.
    """
    indices = np.unique(np.asarray(clusters), return_inverse=True)[1]
    sizes = np.bincount(indices)
    data, added = finite(values), int(sizes.max())
    longer = np.append(data, np.zeros(added)), np.append(indices, np.full(added, len(sizes)))
    return effective_sample_size(*longer) * len(data) / (len(data) + added)


def check_max(name: str, value: float, limit: float) -> Check:
    """Check that a value of one model, such as its KL to the reference policy, is at most ``limit``; NaN fails."""
    passed = value <= limit
    sentence = f"{name} is {value:.4g}, {'within' if passed else 'not within'} the limit of {limit:g}"
    bounds = dict.fromkeys(("estimate", "low", "high"), value)
    return Check(name=name, **bounds, p_value=None, limit=limit, passed=passed, sentence=sentence)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PairedMetric:
    """One metric of both models on the same N problems, in the same order: float [N] each, binary or real.

    ``margin`` is the largest loss that a guard accepts, in the metric's unit; the primary metric has none.
    """

    name: str
    champion: Values
    challenger: Values
    margin: float = 0.0
    higher_is_better: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class PromotionRule:
    """Rule of a promotion. ``alpha``: level of all looks together. ``min_gain``: minimum gain of the primary metric."""

    alpha: float = 0.05
    min_gain: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 < self.alpha < 0.5 or self.min_gain < 0.0:
            raise DataError(f"alpha {self.alpha} is not in (0, ½), or min_gain {self.min_gain} is below 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class PromotionDecision:
    """Decision with all checks. ``look`` and ``alpha``: number and level of this look."""

    promote: bool
    look: int
    alpha: float
    checks: tuple[Check, ...]
    sentence: str


def alpha_of_look(alpha: float, look: int) -> float:
    """Return the level of the ``look``-th look (from 1): ``alpha / (t (t + 1))``; its sum over all looks is ``alpha``.

    Raises:
        DataError: ``look`` is below 1.
    """
    if look < 1:
        raise DataError(f"look {look}: looks count from 1")
    return alpha / (look * (look + 1))


def decide(
    primary: PairedMetric | None,
    guards: Sequence[PairedMetric],
    limits: Sequence[Check],
    *,
    rule: PromotionRule,
    look: int,
    seed: int,
) -> PromotionDecision:
    """Decide on a challenger. Without a champion ``primary`` is None and ``guards`` is empty.

    ``limits`` are conditions on the challenger alone (``check_min``). Bootstrap draws depend only on ``seed`` and the
    name of a check.

    Raises:
        DataError: Sides of different lengths, no values, or a guard without a champion.
        NonFiniteError: NaN or infinity among the values.
    """
    if primary is None and guards:
        raise DataError("guards need a champion", fix="pass only limits")
    alpha = alpha_of_look(rule.alpha, look)
    gain = (_gain(primary, rule.min_gain, alpha, seed=seed),) if primary else ()
    checks = (*gain, *(_non_inferior(guard, alpha, seed=seed) for guard in guards), *limits)
    failed = [check for check in checks if not check.passed]
    return PromotionDecision(
        promote=not failed, look=look, alpha=alpha, checks=checks, sentence=_summary(failed, first=primary is None)
    )


def superiority_p(pair: PairedMetric, *, seed: int, flips: int = 10_000) -> float:
    """Return the one-sided p value of "the challenger is better": exact for binary metrics, by sign flips for others.

    For binary metrics it is the unconditional test of McNemar's statistic (``noninferiority_p`` at a margin of 0),
    which has more power than the conditional test. It is 1 if the challenger is not ahead.

    Raises:
        DataError, NonFiniteError: As in :func:`decide`.
    """
    differences = _differences(pair)
    if _is_binary(pair):
        won, lost = _changed(differences)
        return noninferiority_p(won, lost, len(differences), 0.0) if won > lost else 1.0
    return sign_flip_p(differences, seed=derive_seed(seed, "promotion", pair.name, "signs"), flips=flips)


def sign_flip_p(differences: Values, *, seed: int, flips: int = 10_000) -> float:
    """Return the one-sided p value of "the mean of [N] paired differences is above 0", by random sign flips.

    ``(1 + #{flipped sum >= sum}) / (1 + flips)``, which is valid for every number of flips (Phipson & Smyth 2010).
    """
    generator = np.random.default_rng(seed)
    total, reached = float(differences.sum()), 0
    slack = 1e-9 * float(np.abs(differences).sum())  # equal sums may differ by rounding; they count as reached
    chunk = max(1, _CHUNK_VALUES // len(differences))
    for start in range(0, flips, chunk):
        signs = generator.integers(0, 2, (min(chunk, flips - start), len(differences)), dtype=np.int8) * 2 - 1
        reached += int((signs @ differences >= total - slack).sum())
    return (1 + reached) / (1 + flips)


def bootstrap_means(differences: Values, *, seed: int, resamples: int) -> Values:
    """Return the means of resamples of [N] differences and two added ones, ±s: float [resamples].

    s is the largest |difference|: a few equal differences are no certainty.
    """
    scale = float(np.abs(differences).max())
    values, counts = np.unique(np.concatenate([differences, [scale, -scale]]), return_counts=True)
    n, generator = int(counts.sum()), np.random.default_rng(seed)
    chunk = max(1, _CHUNK_VALUES // len(values))
    sizes = [min(chunk, resamples - start) for start in range(0, resamples, chunk)]
    return np.concatenate([generator.multinomial(n, counts / n, size=size) @ values / n for size in sizes])


def _gain(pair: PairedMetric, min_gain: float, alpha: float, *, seed: int) -> Check:
    differences = _differences(pair)
    p_value = superiority_p(pair, seed=seed, flips=_num_resamples(alpha))
    estimate = float(differences.mean())
    is_better, is_enough = p_value <= alpha, estimate >= min_gain
    sentence = f"{pair.name} changes by {estimate:+.4g} over the champion, p = {p_value:.2g} at level {alpha:.2g}: " + (
        ("better" if is_enough else f"better, but by less than {min_gain:g}") if is_better else "not shown to be better"
    )
    means = None if _is_binary(pair) else _means(pair, alpha, seed=seed)
    low, high = _ends(differences, means, alpha)
    bounds = {"estimate": estimate, "low": low, "high": high, "p_value": p_value, "limit": min_gain}
    return Check(name=pair.name, **bounds, passed=is_better and is_enough, sentence=sentence)


def _non_inferior(pair: PairedMetric, alpha: float, *, seed: int) -> Check:
    differences = _differences(pair)
    n, estimate, more = len(differences), float(differences.mean()), ""
    means = None if _is_binary(pair) else _means(pair, alpha, seed=seed)
    if means is None:
        p_value, minimum = noninferiority_p(*_changed(differences), n, pair.margin), min_sample_size(pair.margin, alpha)
        more = f"; not enough problems: at least {minimum} are needed" if n < minimum else ""
    else:
        p_value = (1 + int((means <= -pair.margin).sum())) / (1 + len(means))
    passed = p_value <= alpha
    sign = 1.0 if pair.higher_is_better else -1.0
    low, high = sorted(sign * end for end in _ends(differences, means, alpha))
    sentence = (
        f"{pair.name} changes by {sign * estimate:+.4g}; a loss of {pair.margin:g} or more is "
        f"{'ruled out' if passed else 'not ruled out'} (p = {p_value:.2g} at level {alpha:.2g}, n = {n}{more})"
    )
    bounds = {"estimate": sign * estimate, "low": low, "high": high, "p_value": p_value, "limit": -sign * pair.margin}
    return Check(name=pair.name, **bounds, passed=passed, sentence=sentence)


def _is_binary(pair: PairedMetric) -> bool:
    """Return True for 0/1 values with a margin that is a fraction: these are tested exactly."""
    return bool(np.isin(np.concatenate([pair.champion, pair.challenger]), (0.0, 1.0)).all()) and pair.margin <= 1.0


def _changed(differences: Values) -> tuple[int, int]:
    return int((differences > 0).sum()), int((differences < 0).sum())


def _means(pair: PairedMetric, alpha: float, *, seed: int) -> Values:
    draws = derive_seed(seed, "promotion", pair.name)
    return bootstrap_means(_differences(pair), seed=draws, resamples=_num_resamples(alpha))


def _num_resamples(alpha: float) -> int:
    return min(math.ceil(_RESAMPLES_OVER_ALPHA / alpha), _MAX_RESAMPLES)


def _ends(differences: Values, means: Values | None, alpha: float) -> tuple[float, float]:
    """Return bounds at ``alpha`` of the mean difference, from resampled ``means``; None for binary differences."""
    if means is None:
        return score_interval(*_changed(differences), len(differences), confidence=1.0 - 2.0 * alpha)
    (low, high), estimate = np.quantile(means, [alpha, 1.0 - alpha]), float(differences.mean())
    return min(float(low), estimate), max(float(high), estimate)


def _differences(pair: PairedMetric) -> Values:
    """Return challenger minus champion, with the sign such that higher is better."""
    if pair.champion.shape != pair.challenger.shape or pair.champion.ndim != 1 or not len(pair.champion):
        raise DataError(
            f"{pair.name}: {pair.challenger.shape} values of the challenger against {pair.champion.shape}",
            fix="evaluate both models on the same problems",
        )
    differences = pair.challenger - pair.champion
    if not np.isfinite(differences).all():
        raise NonFiniteError(f"{pair.name}: {int((~np.isfinite(differences)).sum())} values are not finite")
    return differences if pair.higher_is_better else -differences


def _summary(failed: Sequence[Check], *, first: bool) -> str:
    if failed:
        return f"Refused: {'; '.join(check.sentence for check in failed)}."
    return "Passed: the first champion, within every limit." if first else "Passed: better, and no guard is broken."
