"""Whose turn it is: the prompts of each iteration, and what is spared of those that teach nothing.

A group whose rewards are all equal teaches nothing, and the batch would shrink as the policy gets better. Two things
help, each a function of the seed and of what a run has shown, so that a resumed run draws the same:

- *Dynamic sampling*: such a group gives way, as a whole, to a fresh prompt's group (DAPO, Yu et al. 2025). Groups are
  replaced in rounds.
- *Passing over*: a prompt that gave such groups is likely to give another, so it loses turns before anything is sampled
  for it, with a probability that grows with their number in a row (the filter of GRESO, Zheng et al. 2025, arXiv
  2506.02177).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from rlcore.errors import CheckpointError
from rlcore.seeding import derive_seed, shuffled
from rlcore.types import Prompt

G = TypeVar("G")

MIX_PERIOD = 1000
"""Places after which the mix of data sets repeats: shares are exact to a thousandth."""

MIN_KEEP_PROB = 1 / 16
"""The least chance that a prompt keeps its turn: a policy that learns may come to solve it, or to forget it."""


class PromptSchedule:
    """The prompts of a run's iterations from the first, ``count`` each.

    Each data set has an endless row of epochs, every epoch in an order of its own. The data sets take turns by their
    ``shares``. A prompt of n groups without signal in a row keeps its turn with a chance of ``revisit ** n``; who
    loses it does so until the next epoch.

    What comes is a function of the seed and of what the iterations before have shown. :meth:`state` has all of it.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        count: int,
        *,
        seed: int,
        shares: Mapping[str, float] | None = None,
        revisit: float = 1.0,
    ) -> None:
        self._prompts, self._count, self._seed, self._revisit = prompts, count, seed, revisit
        self._cycle: tuple[str, ...] = ("",)
        self._pools: dict[str, Sequence[int]] = {"": range(len(prompts))}
        if shares is not None and len(shares) > 1:
            self._cycle = mix_cycle(tuple(shares.items()))
            self._pools = {name: [i for i, each in enumerate(prompts) if each.dataset == name] for name in shares}
        self._num_started = 0
        self._cursors = dict.fromkeys(self._pools, 0)
        self._zero_signal_streak: dict[str, int] = {}
        self._pending: dict[int, tuple[list[int], int]] = {}

    def prompts_for(self, iteration: int) -> list[Prompt]:
        """The prompts of an iteration (from 1) that :meth:`record_signals` has not closed yet.

        They are chosen when they are asked for first, by what was heard until then.

        Raises:
            CheckpointError: the iteration is closed, so the run stands elsewhere than its turns.
        """
        while self._num_started < iteration:
            self._begin()
        if iteration not in self._pending:
            raise CheckpointError(
                f"iteration {iteration} has had its prompts: {self._num_started} iterations have been begun, "
                "and the run stands before one of them",
                fix="restore the checkpoint as it was written, or run the stage from its start",
            )
        return [self._prompts[index] for index in self._pending[iteration][0]]

    def num_skipped(self, iteration: int) -> int:
        """The number of prompts that lost their turn in an iteration that is not closed yet."""
        return self._pending[iteration][1]

    def record_signals(self, iteration: int, signals: Iterable[tuple[str, bool]]) -> None:
        """Close an iteration. ``signals``: of each of its groups the ``prompt_id``, and whether it has a signal."""
        if self._revisit < 1.0:
            for prompt_id, has_signal in signals:
                if has_signal:
                    self._zero_signal_streak.pop(prompt_id, None)
                else:
                    self._zero_signal_streak[prompt_id] = self._zero_signal_streak.get(prompt_id, 0) + 1
        del self._pending[iteration]

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, as JSON values. It grows with the prompts without signal, not with iterations."""
        opened = {str(iteration): list(each) for iteration, each in self._pending.items()}
        return {
            "begun": self._num_started,
            "places": dict(self._cursors),
            "open": opened,
            "silent": dict(self._zero_signal_streak),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state` gave, or from the start if it is empty."""
        self._num_started = state.get("begun", 0)
        self._cursors = dict.fromkeys(self._pools, 0) | state.get("places", {})
        self._zero_signal_streak = dict(state.get("silent", {}))
        self._pending = {int(key): (indices, passed) for key, (indices, passed) in state.get("open", {}).items()}

    def _begin(self) -> None:
        """Choose the prompts of the next iteration."""
        start, passed = self._num_started * self._count, 0
        found = []
        for place in range(start, start + self._count):
            name = self._cycle[place % len(self._cycle)]
            index = self._next(name)
            while not self._is_kept(name, index):
                index, passed = self._next(name), passed + 1
            found.append(index)
        self._num_started += 1
        self._pending[self._num_started] = (found, passed)

    def _next(self, name: str) -> int:
        """The next prompt in the row of a data set."""
        pool = self._pools[name]
        epoch, offset = divmod(self._cursors[name], len(pool))
        self._cursors[name] += 1
        purpose = ("prompts", name, epoch) if name else ("prompts", epoch)
        return pool[_order(len(pool), self._seed, purpose)[offset]]

    def _is_kept(self, name: str, index: int) -> bool:
        times = self._zero_signal_streak.get(self._prompts[index].prompt_id, 0)
        if not times:
            return True
        chance: float = max(MIN_KEEP_PROB, self._revisit**times)
        return derive_seed(self._seed, "revisit", name, self._cursors[name]) < chance * 2**63


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledGroups(Generic[G]):
    """``groups``: what is trained on, in the order of the batch. ``replaced``: what gave way, in the order of rounds.

    Every group that was sampled is in exactly one of the two.
    """

    groups: tuple[G, ...]
    replaced: tuple[G, ...]


def replace_groups(
    groups: Sequence[G],
    draw: Callable[[int, int], Sequence[G]],
    carries_signal: Callable[[G], bool],
    *,
    max_rounds: int,
) -> SampledGroups[G]:
    """Replace the groups without signal until there are none, or no prompts, or no rounds left.

    ``draw(round, count)``, with rounds from 1, gives ``count`` groups of fresh prompts, or fewer where prompts run out.
    What is still without signal after the last round stays in the batch.
    """
    current = list(groups)
    replaced: list[G] = []
    for number in range(1, max_rounds + 1):
        empty = [place for place, group in enumerate(current) if not carries_signal(group)]
        fresh = draw(number, len(empty)) if empty else ()
        if not fresh:
            break
        for place, group in zip(empty, fresh, strict=False):  # the last places keep their group where prompts ran out
            replaced.append(current[place])
            current[place] = group
    return SampledGroups(groups=tuple(current), replaced=tuple(replaced))


def unused_prompts(prompts: Sequence[Prompt], used: Collection[str], *, seed: int, iteration: int) -> list[Prompt]:
    """Every prompt whose ``prompt_id`` the iteration has not used, in an order of this iteration's own.

    The epochs of a run do not count these draws: every prompt keeps its turn.
    """
    order = shuffled(len(prompts), seed, "replacements", iteration)
    return [prompts[place] for place in order if prompts[place].prompt_id not in used]


def interleave(prompts: Sequence[Prompt], shares: Mapping[str, float]) -> Iterator[Prompt]:
    """Every prompt once. The data sets take turns by their shares, until each is used up."""
    waiting = {name: iter([prompt for prompt in prompts if prompt.dataset == name]) for name in shares}
    while waiting:
        for name in mix_cycle(tuple(shares.items())):
            if name in waiting:
                prompt = next(waiting[name], None)
                if prompt is None:
                    del waiting[name]
                else:
                    yield prompt


@functools.lru_cache(maxsize=8)
def mix_cycle(shares: tuple[tuple[str, float], ...]) -> tuple[str, ...]:
    """The data set of each of ``MIX_PERIOD`` places: always the one that is furthest behind its share.

    ``mix_cycle((("a", 2.0), ("b", 1.0)))`` begins with a, b, a, and repeats that.
    """
    total = sum(share for _, share in shares)
    counts = {name: 0 for name, _ in shares}
    turns = []
    for place in range(1, MIX_PERIOD + 1):
        behind = {name: place * share / total - counts[name] for name, share in shares}
        name = max(behind, key=behind.__getitem__)
        counts[name] += 1
        turns.append(name)
    return tuple(turns)


@functools.lru_cache(maxsize=16)
def _order(count: int, seed: int, purpose: tuple[int | str, ...]) -> list[int]:
    return shuffled(count, seed, *purpose)
