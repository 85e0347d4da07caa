"""Preferences as tokens, with their loss: pairs, and the sets in which each compared completion occurs once.

Set s1: prompt q, completions [a, b, c], comparisons a > b, a > c, b > c (a ranking of three).
Set s2: prompt p, completions [d, e], comparison d > e (a single pair).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlcore.algorithms.preference import bradley_terry, smoothed
from rlcore.config import PreferenceLossConfig
from rlcore.hardware.memory import filled_on, positions_on
from rlcore.hardware.sharded import ONE, Ranks, device_of, ranks_of, run_forward
from rlcore.seeding import shuffled
from rlcore.text.packing import TokenSequence, balance
from rlcore.training.optim import add_gradient

if TYPE_CHECKING:
    from jaxtyping import Float


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenPair:
    """Preference pair as tokens.

    Attributes:
        set_id: Equal for pairs of one ranked list.
        margin: Margin in units of the score.
        probability: Probability above ½ that the label is right.
        weight: Loss weight of the pair's whole set.
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
        """Chosen and rejected completion, each with the prompt."""
        chosen, rejected = (
            TokenSequence(prompt_ids=self.prompt_ids, completion_ids=side)
            for side in (self.chosen_ids, self.rejected_ids)
        )
        return chosen, rejected


def different_sequences(pairs: Sequence[TokenPair]) -> list[TokenSequence]:
    """Return every completion of the pairs once, in order of first occurrence."""
    return list(dict.fromkeys(side for pair in pairs for side in pair.sides))


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Comparison in a set: indices of the ``better`` and ``worse`` completion, and the pair's ``weight``."""

    better: int
    worse: int
    margin: float
    probability: float
    weight: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PreferenceSet:
    """Completions of one prompt, each once, and the comparisons between them."""

    prompt_ids: tuple[int, ...]
    completions: tuple[tuple[int, ...], ...]
    comparisons: tuple[Comparison, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of the packed row: the prompt once, then every completion."""
        return len(self.prompt_ids) + sum(map(len, self.completions))

    def sequences(self) -> list[TokenSequence]:
        """Return the completions with their prompt, in order."""
        return [TokenSequence(prompt_ids=self.prompt_ids, completion_ids=one) for one in self.completions]


def preference_sets(pairs: Sequence[TokenPair]) -> list[PreferenceSet]:
    """Group pairs by ``set_id``, in order of first occurrence.

    The pairs of a set share its weight, so it counts once even if the gate kept only some of its pairs.
    """
    members: dict[tuple[str, tuple[int, ...]], list[TokenPair]] = {}
    for pair in pairs:
        members.setdefault((pair.set_id, pair.prompt_ids), []).append(pair)
    return [_gather(prompt_ids, group) for (_, prompt_ids), group in members.items()]


def _gather(prompt_ids: tuple[int, ...], pairs: Sequence[TokenPair]) -> PreferenceSet:
    indices: dict[tuple[int, ...], int] = {}
    comparisons = [
        Comparison(
            better=indices.setdefault(pair.chosen_ids, len(indices)),
            worse=indices.setdefault(pair.rejected_ids, len(indices)),
            margin=pair.margin,
            probability=pair.probability,
            weight=pair.weight / len(pairs),
        )
        for pair in pairs
    ]
    return PreferenceSet(prompt_ids=prompt_ids, completions=tuple(indices), comparisons=tuple(comparisons))


def side_indices(sets: Sequence[PreferenceSet]) -> tuple[list[int], list[int]]:
    """Return the indices of the better and worse sides of all comparisons among the completions of all sets."""
    starts = accumulate((len(each.completions) for each in sets), initial=0)
    placed = [(start, one) for start, each in zip(starts, sets, strict=False) for one in each.comparisons]
    return [start + one.better for start, one in placed], [start + one.worse for start, one in placed]


def microbatches(
    sets: Sequence[PreferenceSet], budget: int, ranks: Ranks = ONE, *, filled: int | None = None
) -> list[list[PreferenceSet]]:
    """Split a minibatch by the token budget, padding included, the longest set first, which fixes the width.

    A set above the budget is split into smaller sets with the same comparisons, and completions may be repeated: the
    graph of one micro-batch must fit into memory. Each rank gets equally many micro-batches; its last may be empty.
    ``filled``: smaller budget of a micro-batch of several sets.
    """
    pieces = [piece for one in sets for piece in _cut(one, budget)]
    mine = balance([piece.num_tokens for piece in pieces], ranks.size)[ranks.rank]
    ordered = sorted((pieces[index] for index in mine), key=lambda piece: piece.num_tokens, reverse=True)
    cut: list[list[PreferenceSet]] = []
    for piece in ordered:
        if cut and cut[-1][0].num_tokens * (len(cut[-1]) + 1) <= (filled or budget):
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
    indices: dict[int, int] = {}
    renamed = [
        dataclasses.replace(
            one,
            better=indices.setdefault(one.better, len(indices)),
            worse=indices.setdefault(one.worse, len(indices)),
        )
        for one in comparisons
    ]
    completions = tuple(whole.completions[index] for index in indices)
    return PreferenceSet(prompt_ids=whole.prompt_ids, completions=completions, comparisons=tuple(renamed))


def shuffled_sets(
    sets: Sequence[PreferenceSet], *, num_epochs: int, batch_size: int, seed: int, name: str
) -> list[list[PreferenceSet]]:
    """Return the minibatches of all epochs, reshuffled in every epoch; ``name`` separates the draws of trainings."""
    orders = [shuffled(len(sets), seed, name, epoch) for epoch in range(num_epochs)]
    return [
        [sets[index] for index in order[start : start + batch_size]]
        for order in orders
        for start in range(0, len(order), batch_size)
    ]


def accumulate_gradient(
    model: Any,
    sets: Sequence[PreferenceSet],
    loss_of: Callable[[Sequence[PreferenceSet], float], tuple[Tensor, Tensor, Tensor]],
    *,
    tokens_per_microbatch: int,
    scale: float,
    name: str,
) -> tuple[float, Float[Tensor, "sides pairs"]]:
    """Add the gradient of a minibatch's loss times ``scale``; return the loss and the scores of both sides [2, P].

    Every set counts once. Ranks split the work.

    Args:
        loss_of: Returns for a micro-batch, given the weight of the minibatch: a scalar with the gradient of its loss,
            the loss, and the scores of better and worse sides.

    Raises:
        NonFiniteError: NaN or infinity in the loss; no step was taken.
    """
    ranks, device = ranks_of(model), device_of(model).type
    weight = sum(one.weight for each in sets for one in each.comparisons)
    total, sides = 0.0, list[Tensor]()
    budget, filled = positions_on(device, tokens_per_microbatch), filled_on(device, tokens_per_microbatch)
    for group in microbatches(sets, budget, ranks, filled=filled):
        pull, loss, found = run_forward(model, partial(loss_of, group, weight))
        add_gradient(pull, scale=scale, name=name, ranks=ranks)
        total += float(loss.detach())
        sides.append(found.detach().cpu())
    ranks.sum_gradients(parameter for parameter in model.parameters() if parameter.requires_grad)
    losses, parts = zip(*ranks.gather((total, torch.cat(sides, dim=1))), strict=True)
    return sum(losses), torch.cat(parts, dim=1)


def comparison_loss(
    sets: Sequence[PreferenceSet], scores: Float[Tensor, "completions"], weight: float, loss: PreferenceLossConfig
) -> tuple[Float[Tensor, ""], Float[Tensor, "sides pairs"]]:
    """Return the contribution of some sets to a minibatch's loss, and the scores of both sides [2, P].

    ``scores``: of all completions of the sets; ``weight``: of the minibatch.
    """
    comparisons = [one for each in sets for one in each.comparisons]
    better, worse = side_indices(sets)
    chosen, rejected = scores[better], scores[worse]
    found = bradley_terry(
        chosen,
        rejected,
        margins=scores.new_tensor([one.margin + loss.margin for one in comparisons]),
        probabilities=smoothed(scores.new_tensor([one.probability for one in comparisons]), loss.label_smoothing),
        weights=scores.new_tensor([one.weight / weight for one in comparisons]),
    )
    return found, torch.stack([chosen, rejected])
