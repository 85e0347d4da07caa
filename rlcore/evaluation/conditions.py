"""Conditions of a gate: a minimum fraction or a maximum value of one model."""

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

    Few wrong values cannot show that values of a cluster are correlated. Without the added cluster a fraction of
    exactly the limit passed in up to 7.7 % instead of 2.5 %.
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
    return Check(
        name=name, estimate=value, low=value, high=value, p_value=None, limit=limit, passed=passed, sentence=sentence
    )
