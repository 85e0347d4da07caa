"""Advantages as plain loops over Python floats: slow, obvious, and sharing no line with the library."""

from __future__ import annotations

from collections.abc import Sequence


def gae(
    rewards: Sequence[float], values: Sequence[float], mask: Sequence[bool], *, gamma: float, lam: float
) -> list[float]:
    """GAE of one episode by its definition, ``A[t] = sum_l (gamma lam)^l delta[t+l]``, on the policy's tokens alone."""
    own = [t for t in range(len(mask)) if mask[t]]
    r = [rewards[t] for t in own]
    v = [values[t] for t in own] + [0.0]  # nothing follows the end of an episode
    delta = [r[t] + gamma * v[t + 1] - v[t] for t in range(len(own))]
    result = [0.0] * len(mask)
    for place, t in enumerate(own):
        result[t] = sum((gamma * lam) ** step * delta[place + step] for step in range(len(own) - place))
    return result


def mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


def population_std(numbers: Sequence[float]) -> float:
    centre = mean(numbers)
    return mean([(number - centre) ** 2 for number in numbers]) ** 0.5


def group_normalized(rewards: Sequence[float]) -> list[float]:
    """``(R - mean) / std`` of one group."""
    return [(reward - mean(rewards)) / population_std(rewards) for reward in rewards]


def whiten(numbers: Sequence[float]) -> list[float]:
    """Mean 0, variance 1."""
    return group_normalized(numbers)
