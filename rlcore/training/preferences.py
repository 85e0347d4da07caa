"""Preferences as tokens, with their loss: pairs, and the sets in which each compared completion occurs once.

Set s1: prompt q, completions [a, b, c], pairs a > b, a > c, b > c (a ranking of three).
Set s2: prompt p, completions [d, e], pair d > e.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlcore.algorithms.preference import bradley_terry, smoothed
from rlcore.config import PreferenceLossConfig
from rlcore.hardware.memory import filled_on, positions_on
from rlcore.hardware.sharded import ONE, Ranks, device_of, ranks_of, run_forward
from rlcore.seeding import shuffled
from rlcore.text.packing import TokenSequence, balance
from rlcore.training.optim import Stepper, add_gradient

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
class PreferenceSet:
    """Pairs of one prompt, whose completions are computed once; the ``weight`` of each is its share of the set's."""

    pairs: tuple[TokenPair, ...]

    @property
    def sequences(self) -> list[TokenSequence]:
        """Different completions with their prompt, in order of first occurrence."""
        return different_sequences(self.pairs)

    @property
    def num_tokens(self) -> int:
        """Tokens of the packed row: the prompt once, then every completion."""
        return len(self.pairs[0].prompt_ids) + sum(len(one.completion_ids) for one in self.sequences)


def preference_sets(pairs: Sequence[TokenPair]) -> list[PreferenceSet]:
    """Group pairs by ``set_id``, in order of first occurrence.

    The pairs of a set share its weight, so it counts once even if the gate kept only some of its pairs.
    """
    members: dict[tuple[str, tuple[int, ...]], list[TokenPair]] = {}
    for pair in pairs:
        members.setdefault((pair.set_id, pair.prompt_ids), []).append(pair)
    return [
        PreferenceSet(pairs=tuple(dataclasses.replace(pair, weight=pair.weight / len(group)) for pair in group))
        for group in members.values()
    ]


def microbatches(
    sets: Sequence[PreferenceSet], budget: int, ranks: Ranks = ONE, *, filled: int | None = None
) -> list[list[PreferenceSet]]:
    """Split a minibatch by the token budget, padding included, the longest set first, which fixes the width.

    A set above the budget is split into smaller sets with the same pairs, and completions may be repeated: the
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
    pieces: list[PreferenceSet] = []
    for pair in whole.pairs:
        longer = PreferenceSet(pairs=(*(pieces[-1].pairs if pieces else ()), pair))
        if pieces and longer.num_tokens <= budget:
            pieces[-1] = longer
        else:
            pieces.append(PreferenceSet(pairs=(pair,)))
    return pieces


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


LossOfSets = Callable[[int, Sequence[PreferenceSet], float], tuple[Tensor, Tensor, Tensor]]
"""Loss of a micro-batch, given its tokens and the weight of the minibatch: a scalar with the gradient of the loss, the
loss, and the scores of better and worse sides [2, P]."""


def take_step(
    steps: Stepper, model: Any, sets: Sequence[PreferenceSet], loss_of: LossOfSets, *, name: str
) -> tuple[float, Float[Tensor, "sides pairs"], dict[str, float]]:
    """Take one step over a minibatch, in which every set counts once. Ranks split the work.

    Returns its loss, the scores of both sides before it [2, P], and the metrics of :meth:`Stepper.take`.

    Raises:
        NonFiniteError: NaN or infinity in the loss ``name`` or a gradient; the step was not taken.
        TrainingError: One completion, or the optimizer's state, does not fit into memory.
    """
    ranks, device = ranks_of(model), device_of(model).type
    weight = sum(pair.weight for each in sets for pair in each.pairs)

    def accumulate(tokens: int, scale: float) -> tuple[float, Tensor]:
        total, sides = 0.0, list[Tensor]()
        budget, filled = positions_on(device, tokens), filled_on(device, tokens)
        for group in microbatches(sets, budget, ranks, filled=filled):
            pull, loss, found = run_forward(model, partial(loss_of, tokens, group, weight))
            add_gradient(pull, scale=scale, name=name, ranks=ranks)
            total += float(loss.detach())
            sides.append(found.detach().cpu())
        ranks.sum_gradients(parameter for parameter in model.parameters() if parameter.requires_grad)
        losses, parts = zip(*ranks.gather((total, torch.cat(sides, dim=1))), strict=True)
        return sum(losses), torch.cat(parts, dim=1)

    (loss, sides), metrics = steps.take(accumulate, [one for each in sets for one in each.sequences])
    return loss, sides, metrics


def comparison_loss(
    sets: Sequence[PreferenceSet], scores: Float[Tensor, "completions"], weight: float, loss: PreferenceLossConfig
) -> tuple[Float[Tensor, ""], Float[Tensor, "sides pairs"]]:
    """Return the contribution of some sets to a minibatch's loss, and the scores of both sides [2, P].

    ``scores``: of all completions of the sets; ``weight``: of the minibatch.
    """
    pairs = [pair for each in sets for pair in each.pairs]
    indices, start = list[list[int]](), 0
    for each in sets:
        index = {one: start + number for number, one in enumerate(each.sequences)}
        indices += [[index[side] for side in pair.sides] for pair in each.pairs]
        start += len(index)
    chosen, rejected = (scores[[both[side] for both in indices]] for side in (0, 1))
    found = bradley_terry(
        chosen,
        rejected,
        margins=scores.new_tensor([pair.margin + loss.margin for pair in pairs]),
        probabilities=smoothed(scores.new_tensor([pair.probability for pair in pairs]), loss.label_smoothing),
        weights=scores.new_tensor([pair.weight / weight for pair in pairs]),
    )
    return found, torch.stack([chosen, rejected])
