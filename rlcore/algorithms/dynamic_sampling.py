"""Dynamic sampling: a group without signal gives way, as a whole, to a fresh prompt's group (DAPO, Yu et al. 2025).

A group whose rewards are all equal teaches nothing; without it the batch would shrink as the policy gets better. Groups
are replaced in rounds. Which prompts come next is a function of (seed, iteration): a resumed run draws the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from rlcore.seeding import shuffled
from rlcore.types import Prompt

G = TypeVar("G")


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn(Generic[G]):
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
) -> Drawn[G]:
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
    return Drawn(groups=tuple(current), replaced=tuple(replaced))


def fresh_prompts(prompts: Sequence[Prompt], used: Collection[str], *, seed: int, iteration: int) -> list[Prompt]:
    """Every prompt whose ``prompt_id`` the iteration has not used, in an order of this iteration's own.

    The epochs of a run do not count these draws: every prompt keeps its turn.
    """
    order = shuffled(len(prompts), seed, "replacements", iteration)
    return [prompts[place] for place in order if prompts[place].prompt_id not in used]
