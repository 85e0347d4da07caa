"""How often a guard of the promotion gate passes a share that has fallen by exactly its margin, and a sound one.

Three statistics, by enumeration: the gate's exact test, the end of Tango's score interval, and the percentile bootstrap
that the gate used first, as with endlessly many resamples.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from functools import cache, partial
from types import MappingProxyType

import numpy as np
from scipy.stats import binom

from rlcore.paired import loss_p, score_interval

RulesOut = Callable[[int, int, int, float, float], bool]  # won, lost, problems, margin, level: is the loss ruled out?
AT_THE_MARGIN = ((0.001, 0.051), (0.02, 0.07), (0.085, 0.135), (0.25, 0.3))  # the third: 0.85 against 0.9, independent
SOUND = ((0.01, 0.01), (0.05, 0.05))  # nothing lost on balance
SIZES = (50, 100, 200, 600)


def by_exact_test(won: int, lost: int, n: int, margin: float, level: float) -> bool:
    """As the gate does it."""
    return loss_p(won, lost, n, margin) <= level


def by_score_interval(won: int, lost: int, n: int, margin: float, level: float) -> bool:
    """The lower end of Tango's interval lies above the loss."""
    return score_interval(won, lost, n, confidence=1.0 - 2.0 * level)[0] > -margin


@cache
def bootstrap_p(won: int, lost: int, n: int, margin: float) -> float:
    """Share of resampled means at or below the loss. Two imagined problems, one won and one lost, are among them."""
    size = n + 2
    values = np.zeros(2 * size + 1)  # the sum of a resample, by the power of one draw's Fourier transform
    values[[0, 1, -1]] = (size - won - lost - 2) / size, (won + 1) / size, (lost + 1) / size
    chances = np.fft.irfft(np.fft.rfft(values) ** size, n=2 * size + 1)
    least = math.floor(-margin * size + 1e-9)
    return float(sum(chances[total] for total in range(-size, least + 1)))


def by_bootstrap(won: int, lost: int, n: int, margin: float, level: float) -> bool:
    """The percentile bootstrap's lower end lies above the loss."""
    return bootstrap_p(won, lost, n, margin) < level


STATISTICS: Mapping[str, RulesOut] = MappingProxyType(
    {"exact test": by_exact_test, "score interval": by_score_interval, "percentile bootstrap (before)": by_bootstrap}
)


def passes(rules_out: RulesOut, n: int, won: float, lost: float, *, margin: float, level: float) -> float:
    """The chance that a guard passes, where a problem is won and lost with these chances."""
    total = 0.0
    weights = binom.pmf(np.arange(n + 1), n, lost)
    for count in np.flatnonzero(weights > 1e-13).tolist():
        is_passed = partial(_passes, rules_out, count, n, margin, level)
        least = bisect_left(range(n - count + 1), True, key=is_passed)
        total += float(weights[count] * binom.sf(least - 1, n - count, won / (1.0 - lost)))
    return total


def _passes(rules_out: RulesOut, lost: int, n: int, margin: float, level: float, won: int) -> bool:
    return rules_out(won, lost, n, margin, level)


def print_tables(*, margin: float, level: float) -> None:
    """At the margin, where the level should hold; and power."""
    for label, worlds in (("worse by exactly the margin", AT_THE_MARGIN), ("that has lost nothing", SOUND)):
        print(f"\nA slice {label} ({margin:g}): chance that its guard passes at level {level:g}, by enumeration\n")
        print(f"| problems | statistic | {' | '.join(f'won {won:g}, lost {lost:g}' for won, lost in worlds)} |")
        print("|---" * (2 + len(worlds)) + "|")
        for n in SIZES:
            for name, rules_out in STATISTICS.items():
                found = (passes(rules_out, n, won, lost, margin=margin, level=level) for won, lost in worlds)
                print(f"| {n} | {name} | {' | '.join(f'{each:.4f}' for each in found)} |")
