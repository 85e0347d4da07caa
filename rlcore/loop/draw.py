"""Which prompts come when: epochs of one data set, or several data sets mixed by shares.

Both are functions of the place in an endless row, so that a resumed run draws the same.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence

from rlcore.seeding import shuffled
from rlcore.types import Prompt

CYCLE = 1000
"""Places after which the mix of data sets repeats: shares are exact to a thousandth."""


def window(prompts: Sequence[Prompt], start: int, count: int, *, seed: int) -> list[Prompt]:
    """``count`` prompts from place ``start`` of an endless row of epochs, each in an order of its own."""
    places = (divmod(place, len(prompts)) for place in range(start, start + count))
    return [prompts[_order(len(prompts), (seed, "prompts", epoch))[offset]] for epoch, offset in places]


def window_by_shares(
    prompts: Sequence[Prompt], shares: Mapping[str, float], start: int, count: int, *, seed: int
) -> list[Prompt]:
    """``count`` prompts from place ``start`` of an endless row in which every data set has its share.

    The data sets take turns as evenly as their shares allow, and each goes through epochs of its own.
    """
    pools = by_dataset(prompts, shares)
    turns = cycle_of(tuple(shares.items()))
    in_cycle = {name: turns.count(name) for name in shares}
    found = []
    for place in range(start, start + count):
        round_number, offset = divmod(place, CYCLE)
        name = turns[offset]
        turn = round_number * in_cycle[name] + turns[:offset].count(name)
        epoch, position = divmod(turn, len(pools[name]))
        found.append(pools[name][_order(len(pools[name]), (seed, "prompts", name, epoch))[position]])
    return found


def mixed_by_shares(prompts: Sequence[Prompt], shares: Mapping[str, float]) -> Iterator[Prompt]:
    """Every prompt once, data sets in turns by their shares; a data set that is used up is left out from there on."""
    waiting = {name: iter(pool) for name, pool in by_dataset(prompts, shares).items()}
    while waiting:
        for name in cycle_of(tuple(shares.items())):
            if name in waiting:
                prompt = next(waiting[name], None)
                if prompt is None:
                    del waiting[name]
                else:
                    yield prompt


def by_dataset(prompts: Sequence[Prompt], names: Mapping[str, float]) -> dict[str, list[Prompt]]:
    """The prompts of each of the named data sets, in their order."""
    return {name: [prompt for prompt in prompts if prompt.dataset == name] for name in names}


@functools.lru_cache(maxsize=8)
def cycle_of(shares: tuple[tuple[str, float], ...]) -> tuple[str, ...]:
    """The data set of each of ``CYCLE`` places: at every one, that which is furthest behind its share.

    ``cycle_of((("a", 2.0), ("b", 1.0)))`` begins with a, b, a, and goes on so.
    """
    total = sum(share for _, share in shares)
    counts = {name: 0 for name, _ in shares}
    turns = []
    for place in range(1, CYCLE + 1):
        behind = {name: place * share / total - counts[name] for name, share in shares}
        name = max(behind, key=behind.__getitem__)
        counts[name] += 1
        turns.append(name)
    return tuple(turns)


@functools.lru_cache(maxsize=16)
def _order(count: int, purpose: tuple[int | str, ...]) -> list[int]:
    seed, *names = purpose
    return shuffled(count, int(seed), *names)
