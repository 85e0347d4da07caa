"""One condition of a gate, and the conditions on one model alone: a share of at least, a figure of at most."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rlcore.evaluation import accuracy, independent_values
from rlcore.paired import lowest_share


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


def at_least(
    name: str,
    values: Sequence[float],
    limit: float,
    *,
    clusters: Sequence[int] | None = None,
    confidence: float = 0.95,
) -> Check:
    """A share of one model alone, verdicts [N] in 0..1: its exact interval's lower end must reach ``limit``.

    A true share of exactly ``limit`` passes with chance (1 - ``confidence``) / 2 at most. The upper end is Wilson's.
    ``clusters`` as in :func:`rlcore.evaluation.accuracy`.
    """
    share = accuracy(values, clusters=clusters, confidence=confidence)
    n = share.n if clusters is None else math.floor(independent_values(values, clusters) + 1e-9)
    low = lowest_share(math.floor(share.mean * n + 1e-9), n, (1.0 - confidence) / 2.0)
    passed = low >= limit
    sentence = f"{name} is at least {low:.3f}, {'which reaches' if passed else 'which does not reach'} {limit:g}"
    bounds = {"estimate": share.mean, "low": low, "high": share.high}
    return Check(name=name, **bounds, p_value=None, limit=limit, passed=passed, sentence=sentence)


def at_most(name: str, value: float, limit: float) -> Check:
    """A single figure of one model, such as its KL to the reference: at most ``limit``; NaN does not pass."""
    passed = value <= limit
    sentence = f"{name} is {value:.4g}, {'within' if passed else 'not within'} the limit of {limit:g}"
    return Check(
        name=name, estimate=value, low=value, high=value, p_value=None, limit=limit, passed=passed, sentence=sentence
    )
