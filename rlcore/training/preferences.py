"""Preferences as tokens: pairs, and the sets in which they were judged, where each completion stands once.

Set s1: prompt q, completions [a, b, c], comparisons a > b, a > c, b > c (a ranking of three).
Set s2: prompt p, completions [d, e], comparison d > e (a pair judged by itself).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from rlcore.distributed.ranks import ONE, Ranks
from rlcore.text.packing import TokenSequence, balance


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenPair:
    """A preference pair as tokens.

    ``set_id``: pairs of one ranked list share it. ``margin`` is in units of the score; ``probability`` (above ½) is
    that of the label being right; ``weight`` is how much the pair's whole set counts.
    """

    set_id: str
    prompt_ids: tuple[int, ...]
    chosen_ids: tuple[int, ...]
    rejected_ids: tuple[int, ...]
    margin: float = 0.0
    probability: float = 1.0
    weight: float = 1.0

    @property
    def sides(self) -> tuple[TokenSequence, TokenSequence]:
        """The chosen and the rejected completion, each with the prompt."""
        chosen, rejected = (
            TokenSequence(prompt_ids=self.prompt_ids, completion_ids=side)
            for side in (self.chosen_ids, self.rejected_ids)
        )
        return chosen, rejected


def different_sequences(pairs: Sequence[TokenPair]) -> list[TokenSequence]:
    """Every completion of some pairs once, in the order of its first pair."""
    return list(dict.fromkeys(side for pair in pairs for side in pair.sides))


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """One judged pair of a set: ``better`` and ``worse`` are places in its completions, ``weight`` is the pair's."""

    better: int
    worse: int
    margin: float
    probability: float
    weight: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PreferenceSet:
    """The completions of one prompt, each once, and the comparisons between them."""

    prompt_ids: tuple[int, ...]
    completions: tuple[tuple[int, ...], ...]
    comparisons: tuple[Comparison, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of the packed row: the prompt once, then every completion."""
        return len(self.prompt_ids) + sum(map(len, self.completions))

    def sequences(self) -> list[TokenSequence]:
        """The completions with their prompt, in order."""
        return [TokenSequence(prompt_ids=self.prompt_ids, completion_ids=one) for one in self.completions]


def preference_sets(pairs: Sequence[TokenPair]) -> list[PreferenceSet]:
    """Pairs gathered by ``set_id``, in the order of each set's first pair.

    The pairs of a set share its weight: it counts once, also when the gate has kept only some of its pairs.
    """
    members: dict[tuple[str, tuple[int, ...]], list[TokenPair]] = {}
    for pair in pairs:
        members.setdefault((pair.set_id, pair.prompt_ids), []).append(pair)
    return [_gather(prompt_ids, group) for (_, prompt_ids), group in members.items()]


def _gather(prompt_ids: tuple[int, ...], pairs: Sequence[TokenPair]) -> PreferenceSet:
    places: dict[tuple[int, ...], int] = {}
    comparisons = [
        Comparison(
            better=places.setdefault(pair.chosen_ids, len(places)),
            worse=places.setdefault(pair.rejected_ids, len(places)),
            margin=pair.margin,
            probability=pair.probability,
            weight=pair.weight / len(pairs),
        )
        for pair in pairs
    ]
    return PreferenceSet(prompt_ids=prompt_ids, completions=tuple(places), comparisons=tuple(comparisons))


def places_of(sets: Sequence[PreferenceSet]) -> tuple[list[int], list[int]]:
    """Where the better and where the worse side of each comparison stands among the completions of all sets."""
    starts = accumulate((len(each.completions) for each in sets), initial=0)
    placed = [(start, one) for start, each in zip(starts, sets, strict=False) for one in each.comparisons]
    return [start + one.better for start, one in placed], [start + one.worse for start, one in placed]


def microbatches(sets: Sequence[PreferenceSet], budget: int, ranks: Ranks = ONE) -> list[list[PreferenceSet]]:
    """Cut a minibatch by the token budget, padding included: the longest first, so the first fixes the width.

    A set above the budget is cut into smaller ones with the same comparisons, in which a completion may stand again:
    the graph of one micro-batch is what has to fit into memory. Each of ``ranks`` gets its share, in equally many
    micro-batches, of which the last may be empty.
    """
    pieces = [piece for one in sets for piece in _cut(one, budget)]
    mine = balance([piece.num_tokens for piece in pieces], ranks.size)[ranks.rank]
    ordered = sorted((pieces[place] for place in mine), key=lambda piece: piece.num_tokens, reverse=True)
    cut: list[list[PreferenceSet]] = []
    for piece in ordered:
        if cut and cut[-1][0].num_tokens * (len(cut[-1]) + 1) <= budget:
            cut[-1].append(piece)
        else:
            cut.append([piece])
    return cut + [[] for _ in range(ranks.max(len(cut)) - len(cut))]


def _cut(whole: PreferenceSet, budget: int) -> list[PreferenceSet]:
    if whole.num_tokens <= budget:
        return [whole]
    pieces: list[list[Comparison]] = []
    for comparison in whole.comparisons:
        if pieces and _subset(whole, [*pieces[-1], comparison]).num_tokens <= budget:
            pieces[-1].append(comparison)
        else:
            pieces.append([comparison])
    return [_subset(whole, piece) for piece in pieces]


def _subset(whole: PreferenceSet, comparisons: Sequence[Comparison]) -> PreferenceSet:
    places: dict[int, int] = {}
    renamed = [
        dataclasses.replace(
            one,
            better=places.setdefault(one.better, len(places)),
            worse=places.setdefault(one.worse, len(places)),
        )
        for one in comparisons
    ]
    completions = tuple(whole.completions[place] for place in places)
    return PreferenceSet(prompt_ids=whole.prompt_ids, completions=completions, comparisons=tuple(renamed))
