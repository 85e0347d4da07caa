"""One condition of a gate, and the conditions on one model alone: a share of at least, a figure of at most."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlcore.evaluation.intervals import accuracy, effective_sample_size, finite
from rlcore.evaluation.paired_tests import fraction_lower_bound


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
    """A share of one model alone, verdicts [N] in 0..1: its exact interval's lower end must reach ``limit``.

    A true share of exactly ``limit`` passes with chance (1 - ``confidence``) / 2 at most: exactly so for independent
    values; for ``clusters``, as in ``accuracy``, in simulations. The upper end is Wilson's.
    """
    share = accuracy(values, clusters=clusters, confidence=confidence)
    n = share.n if clusters is None else math.floor(_surely_independent(values, clusters) + 1e-9)
    low = fraction_lower_bound(math.floor(share.mean * n + 1e-9), n, (1.0 - confidence) / 2.0)
    passed = low >= limit
    sentence = f"{name} is at least {low:.3f}, {'which reaches' if passed else 'which does not reach'} {limit:g}"
    bounds = {"estimate": share.mean, "low": low, "high": share.high}
    return Check(name=name, **bounds, p_value=None, limit=limit, passed=passed, sentence=sentence)


def _surely_independent(values: Sequence[float], clusters: Sequence[int]) -> float:
    """As ``effective_sample_size``, with one more cluster imagined, the largest and all wrong.

    Few wrong values cannot show that those of a cluster go together. Without the imagined ones a share of exactly the
    limit passed in up to 7.7 % in place of 2.5 %.
    """
    places = np.unique(np.asarray(clusters), return_inverse=True)[1]
    sizes = np.bincount(places)
    data, imagined = finite(values), int(sizes.max())
    longer = np.append(data, np.zeros(imagined)), np.append(places, np.full(imagined, len(sizes)))
    return effective_sample_size(*longer) * len(data) / (len(data) + imagined)


def check_max(name: str, value: float, limit: float) -> Check:
    """A single figure of one model, such as its KL to the reference: at most ``limit``; NaN does not pass."""
    passed = value <= limit
    sentence = f"{name} is {value:.4g}, {'within' if passed else 'not within'} the limit of {limit:g}"
    return Check(
        name=name, estimate=value, low=value, high=value, p_value=None, limit=limit, passed=passed, sentence=sentence
    )
