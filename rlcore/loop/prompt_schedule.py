"""Prompt schedule: choose the prompts of each iteration.

Groups whose rewards are all equal carry no learning signal. Two mechanisms avoid them. Both depend only on the seed and
on earlier rollouts, so a resumed run draws the same prompts.

- Dynamic sampling replaces zero-signal groups with groups of unused prompts, in rounds (DAPO, Yu et al. 2025).
- Prompt skipping drops prompts with recent zero-signal groups before sampling (GRESO, Zheng et al. 2025,
  arXiv 2506.02177).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from rlcore.components import Components
from rlcore.errors import CheckpointError
from rlcore.seeding import derive_seed, shuffled
from rlcore.types import Prompt

G = TypeVar("G")

MIX_PERIOD = 1000
"""Length of the dataset cycle. Mixture weights are exact to 1/1000."""

MIN_KEEP_PROB = 1 / 16
"""Lower bound of the keep probability, so that skipped prompts are retried."""


class PromptSchedule:
    """Deterministic sequence of prompts, ``count`` per iteration.

    Each dataset is an endless sequence of shuffled epochs. Datasets are interleaved by ``weights``. After n consecutive
    zero-signal groups, a prompt is kept with probability ``keep_prob ** n``; otherwise it is skipped until the next
    epoch.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        count: int,
        *,
        seed: int,
        weights: Mapping[str, float] | None = None,
        keep_prob: float = 1.0,
    ) -> None:
        self._prompts, self._count, self._seed, self._keep_prob = prompts, count, seed, keep_prob
        self._cycle: tuple[str, ...] = ("",)
        self._pools: dict[str, Sequence[int]] = {"": range(len(prompts))}
        if weights is not None and len(weights) > 1:
            self._cycle = mix_cycle(tuple(weights.items()))
            self._pools = {name: [i for i, each in enumerate(prompts) if each.dataset == name] for name in weights}
        self._num_started = 0
        self._cursors = dict.fromkeys(self._pools, 0)
        self._zero_signal_streak: dict[str, int] = {}
        self._pending: dict[int, tuple[list[int], int]] = {}

    def prompts_for(self, iteration: int) -> list[Prompt]:
        """Return the prompts of an iteration, from 1 on, choosing them on the first call.

        Raises:
            CheckpointError: The iteration was already recorded, so run and schedule are out of step.
        """
        while self._num_started < iteration:
            self._begin()
        if iteration not in self._pending:
            raise CheckpointError(
                f"iteration {iteration} was already recorded: the schedule has started {self._num_started} iterations",
                fix="restore the unchanged checkpoint, or rerun the stage",
            )
        return [self._prompts[index] for index in self._pending[iteration][0]]

    def num_skipped(self, iteration: int) -> int:
        return self._pending[iteration][1]

    def record_signals(self, iteration: int, signals: Iterable[tuple[str, bool]]) -> None:
        """Record ``(prompt_id, has_signal)`` of each group, and close the iteration. Read only with prompt skipping."""
        if self._keep_prob < 1.0:
            for prompt_id, has_signal in signals:
                if has_signal:
                    self._zero_signal_streak.pop(prompt_id, None)
                else:
                    self._zero_signal_streak[prompt_id] = self._zero_signal_streak.get(prompt_id, 0) + 1
        del self._pending[iteration]

    def state(self) -> dict[str, Any]:
        """Return the JSON state for a checkpoint. Its size grows with zero-signal prompts, not with iterations."""
        return {
            "num_started": self._num_started,
            "cursors": dict(self._cursors),
            "pending": {str(iteration): list(each) for iteration, each in self._pending.items()},
            "zero_signal_streak": dict(self._zero_signal_streak),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a state. An empty mapping restarts the schedule."""
        self._num_started = state.get("num_started", 0)
        self._cursors = dict.fromkeys(self._pools, 0) | state.get("cursors", {})
        self._zero_signal_streak = dict(state.get("zero_signal_streak", {}))
        self._pending = {int(key): (indices, skipped) for key, (indices, skipped) in state.get("pending", {}).items()}

    def _begin(self) -> None:
        start, skipped = self._num_started * self._count, 0
        indices = []
        for position in range(start, start + self._count):
            name = self._cycle[position % len(self._cycle)]
            index = self._next(name)
            while not self._is_kept(name, index):
                index, skipped = self._next(name), skipped + 1
            indices.append(index)
        self._num_started += 1
        self._pending[self._num_started] = (indices, skipped)

    def _next(self, name: str) -> int:
        pool = self._pools[name]
        epoch, offset = divmod(self._cursors[name], len(pool))
        self._cursors[name] += 1
        purpose = ("prompts", name, epoch) if name else ("prompts", epoch)
        return pool[_order(len(pool), self._seed, purpose)[offset]]

    def _is_kept(self, name: str, index: int) -> bool:
        times = self._zero_signal_streak.get(self._prompts[index].prompt_id, 0)
        if not times:
            return True
        probability: float = max(MIN_KEEP_PROB, self._keep_prob**times)
        return derive_seed(self._seed, "revisit", name, self._cursors[name]) < probability * 2**63


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledGroups(Generic[G]):
    """Groups sampled in one iteration, each in one field.

    Attributes:
        groups: Groups of the training batch, in batch order.
        replaced: Groups that dynamic sampling replaced, in round order.
    """

    groups: tuple[G, ...]
    replaced: tuple[G, ...]


def replace_groups(
    groups: Sequence[G],
    draw: Callable[[int, int], Sequence[G]],
    has_signal: Callable[[G], bool],
    *,
    max_rounds: int,
) -> SampledGroups[G]:
    """Replace zero-signal groups until none, no prompts or no rounds are left; those that cannot be replaced stay.

    ``draw(round, count)`` returns up to ``count`` groups of unused prompts. Rounds start at 1.
    """
    current = list(groups)
    replaced: list[G] = []
    for number in range(1, max_rounds + 1):
        zero_signal = [index for index, group in enumerate(current) if not has_signal(group)]
        fresh = draw(number, len(zero_signal)) if zero_signal else ()
        if not fresh:
            break
        for index, group in zip(zero_signal, fresh, strict=False):  # the last ones stay if prompts run out
            replaced.append(current[index])
            current[index] = group
    return SampledGroups(groups=tuple(current), replaced=tuple(replaced))


def unused_prompts(prompts: Sequence[Prompt], used: Collection[str], *, seed: int, iteration: int) -> list[Prompt]:
    """Return the prompts not yet used in this iteration, shuffled. The epochs do not advance."""
    order = shuffled(len(prompts), seed, "replacements", iteration)
    return [prompts[index] for index in order if prompts[index].prompt_id not in used]


def interleave(prompts: Sequence[Prompt], weights: Mapping[str, float]) -> Iterator[Prompt]:
    """Yield every prompt once, interleaving datasets by weight until each is exhausted."""
    waiting = {name: iter([prompt for prompt in prompts if prompt.dataset == name]) for name in weights}
    while waiting:
        for name in mix_cycle(tuple(weights.items())):
            if name in waiting:
                prompt = next(waiting[name], None)
                if prompt is None:
                    del waiting[name]
                else:
                    yield prompt


@functools.lru_cache(maxsize=8)
def mix_cycle(weights: tuple[tuple[str, float], ...]) -> tuple[str, ...]:
    """Return the dataset of each position in a cycle of ``MIX_PERIOD``: always the one furthest below its weight.

    ``mix_cycle((("a", 2.0), ("b", 1.0)))`` begins with a, b, a, and repeats that.
    """
    total = sum(weight for _, weight in weights)
    counts = {name: 0 for name, _ in weights}
    cycle = []
    for position in range(1, MIX_PERIOD + 1):
        missing = {name: position * weight / total - counts[name] for name, weight in weights}
        name = max(missing, key=missing.__getitem__)
        counts[name] += 1
        cycle.append(name)
    return tuple(cycle)


@functools.lru_cache(maxsize=16)
def _order(count: int, seed: int, purpose: tuple[int | str, ...]) -> list[int]:
    return shuffled(count, seed, *purpose)


def schedule_of(components: Components) -> PromptSchedule:
    """Return the prompt schedule of a run before its first iteration."""
    config = components.config
    return PromptSchedule(
        components.prompts,
        config.prompts_per_iteration,
        seed=components.seed,
        weights=components.mixture_weights,
        keep_prob=config.sampling.zero_signal_keep_prob,
    )
