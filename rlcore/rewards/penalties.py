"""Penalties: for completions near the length limit, and for repetition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlcore.config import PositiveInt
from rlcore.errors import ConfigError
from rlcore.rewards.answers import has_content
from rlcore.rewards.base import scored
from rlcore.types import Rollout, Score


@dataclass(frozen=True, kw_only=True)
class LengthOptions:
    """Options of the reward ``length``, in tokens. ``limit`` is usually ``sampling.max_new_tokens``.

    ``buffer`` is the interval before the limit in which the penalty grows.
    """

    limit: PositiveInt
    buffer: PositiveInt

    def __post_init__(self) -> None:
        if self.buffer > self.limit:
            raise ConfigError(f"buffer {self.buffer} is longer than limit {self.limit}")


class LengthReward:
    """:func:`overlong_penalty` of the number of sampled tokens, without tool output; -1 for an invisible completion."""

    name = "length"

    def __init__(self, options: LengthOptions) -> None:
        self._options = options

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        return [scored(self.name, self._value(rollout)) for rollout in rollouts]

    def _value(self, rollout: Rollout) -> float:
        if not has_content(rollout.text):
            return -1.0
        return overlong_penalty(sum(rollout.loss_mask), limit=self._options.limit, buffer=self._options.buffer)


def overlong_penalty(length: int, *, limit: int, buffer: int) -> float:
    """Return 0 up to ``limit - buffer`` tokens, then linear to -1 at ``limit``, and -1 beyond.

    This is eq. 13 of DAPO (Yu et al. 2025). ``overlong_penalty(15, limit=20, buffer=10)`` is -0.5.
    """
    return -min(max(length - (limit - buffer), 0) / buffer, 1.0)


@dataclass(frozen=True, kw_only=True)
class RepetitionOptions:
    """Options of the reward ``repetition``. ``ngram`` is the length of the compared n-grams, in words."""

    ngram: PositiveInt = 4


class RepetitionReward:
    """:func:`repetition_penalty` of a completion, 0 to -1; -1 for an invisible completion."""

    name = "repetition"

    def __init__(self, options: RepetitionOptions) -> None:
        self._options = options

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        return [scored(self.name, self._value(rollout.text)) for rollout in rollouts]

    def _value(self, text: str) -> float:
        return repetition_penalty(text.split(), ngram=self._options.ngram) if has_content(text) else -1.0


def repetition_penalty(words: Sequence[str], *, ngram: int) -> float:
    """Return ``distinct n-grams / n-grams - 1``: 0 without repetition, toward -1 (after Yeo et al. 2025, §4.3).

    It is 0 for texts with fewer than two n-grams. ``repetition_penalty("a b a b a b".split(), ngram=2)``: of five pairs
    two are distinct, 2/5 - 1 = -0.6.
    """
    count = len(words) - ngram + 1
    if count < 2:
        return 0.0
    return len({tuple(words[start : start + ngram]) for start in range(count)}) / count - 1.0
