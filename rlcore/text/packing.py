"""Packing of sequences into micro-batches, where completions of one prompt share its tokens.

A row is a tree: the prompt once, then its completions, each of which sees the prompt and itself:

    token_ids     p0 p1 p2 | a0 a1 | b0 b1 b2 | pad
    position_ids   0  1  2 |  3  4 |  3  4  5 |  0
    segment        0  0  0 |  1  1 |  2  2  2 | -1
    predictors           the token a0 is predicted by p2, a1 by a0, b0 by p2, b1 by b0, ...

A token attends to earlier tokens of the prompt and of its own segment. After the backbone, only the N completion
tokens are used, flat and in sequence order.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Bool, Int


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenSequence:
    """A prompt and one completion as token ids."""

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Widths:
    """Allowed row widths: multiples of ``multiple``, at least ``minimum``. Compiled kernels need few widths."""

    multiple: int = 1
    minimum: int = 1

    def of(self, length: int) -> int:
        return max(self.minimum, math.ceil(length / self.multiple) * self.multiple)


EXACT = Widths()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedBatch:
    """Micro-batch of B rows of T positions, with S sequences and N completion tokens.

    Attributes:
        token_ids: int64 [B, T].
        position_ids: int64 [B, T].
        segment: int64 [B, T], 0 for the prompt, k for the k-th completion of the row, -1 for padding.
        predictors: int64 [N], flat position in [B*T] of the hidden state that predicts the token.
        targets: int64 [N].
        sequence_index: int64 [N], index of the token's sequence in the caller's list.
        token_index: int64 [N], index of the token in its completion.
        last_positions: int64 [S], flat position of each sequence's last token.
        sequences: int64 [S], indices of this batch's sequences in the caller's list.
    """

    token_ids: Int[Tensor, "batch time"]
    position_ids: Int[Tensor, "batch time"]
    segment: Int[Tensor, "batch time"]
    predictors: Int[Tensor, "tokens"]
    targets: Int[Tensor, "tokens"]
    sequence_index: Int[Tensor, "tokens"]
    token_index: Int[Tensor, "tokens"]
    last_positions: Int[Tensor, "sequences"]
    sequences: Int[Tensor, "sequences"]

    @property
    def num_tokens(self) -> int:
        """Number of completion tokens, N."""
        return int(self.targets.numel())

    @property
    def shares_prompts(self) -> bool:
        """True if a row holds more than one completion."""
        return len(self.last_positions) > len(self.segment)

    @property
    def attention_mask(self) -> Bool[Tensor, "batch 1 time time"]:
        """Dense attention mask, bool [B, 1, T, T], True where attention is allowed."""
        return tree_mask(self.segment)

    def to(self, device: torch.device) -> PackedBatch:
        return PackedBatch(**{name: getattr(self, name).to(device) for name in self.__slots__})


@dataclass(frozen=True, slots=True)
class _Tree:
    prompt_ids: tuple[int, ...]
    members: tuple[tuple[int, tuple[int, ...]], ...]  # (number of the sequence, completion ids)

    def __len__(self) -> int:
        return len(self.prompt_ids) + sum(len(completion) for _, completion in self.members)


def pack(
    sequences: Sequence[TokenSequence],
    *,
    tokens_per_microbatch: int,
    filled: int | None = None,
    pad_id: int = 0,
    share_prompts: bool = True,
    widths: Widths = EXACT,
) -> list[PackedBatch]:
    """Pack sequences into micro-batches of at most ``tokens_per_microbatch`` positions, padding included.

    As few as the budget allows, and evenly filled, because the largest one decides the memory. A single sequence above
    the budget gets its own micro-batch.

    Args:
        tokens_per_microbatch: Budget in positions. Completions of a prompt that exceed it together are separated.
        filled: Smaller budget of a micro-batch of several rows.
        pad_id: Token id of padding positions.
        share_prompts: If False, every completion gets its own row, for models that do not support trees.

    Raises:
        ValueError: A prompt or completion is empty.
    """
    for number, sequence in enumerate(sequences):
        if not sequence.prompt_ids or not sequence.completion_ids:
            raise ValueError(f"sequence {number} has an empty prompt or completion")
    limit = tokens_per_microbatch if share_prompts else 0
    trees = sorted(_trees(sequences, limit), key=len, reverse=True)
    lengths = [widths.of(len(tree)) for tree in trees]
    most = min(filled or tokens_per_microbatch, tokens_per_microbatch)
    count = len(_cut(lengths, most))
    even = bisect_left(range(most), True, key=lambda budget: len(_cut(lengths, budget)) <= count)
    return [_lay_out(trees[rows], pad_id, widths) for rows in _cut(lengths, even)]


def _cut(widths: Sequence[int], budget: int) -> list[slice]:
    batches, start = list[slice](), 0
    for end in range(1, len(widths) + 1):
        if end == len(widths) or widths[start] * (end + 1 - start) > budget:
            batches.append(slice(start, end))
            start = end
    return batches


def split_across_ranks(
    sequences: Sequence[TokenSequence], ranks: int, *, tokens_per_microbatch: int, share_prompts: bool = True
) -> list[list[int]]:
    """Assign sequences to ``ranks`` by tokens, as evenly as whole trees allow; return indices per rank.

    The longest tree goes first, to the rank with the fewest tokens, so no rank exceeds the mean by a whole tree. A tree
    has at most a quarter of the mean; larger groups are split, and each rank that gets a part computes the prompt.
    """
    fair = math.ceil(sum(map(len, _trees(sequences, sys.maxsize if share_prompts else 0))) / ranks)
    limit = min(tokens_per_microbatch, math.ceil(fair / 4)) if share_prompts else 0
    trees = _trees(sequences, limit)
    assigned = balance([len(tree) for tree in trees], ranks)
    return [sorted(number for index in own for number, _ in trees[index].members) for own in assigned]


def balance(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Assign ``sizes`` to ``ranks``, the largest first, always to the smallest rank; return indices per rank."""
    assigned: list[list[int]] = [[] for _ in range(ranks)]
    sums = [0] * ranks
    for number in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
        rank = min(range(ranks), key=sums.__getitem__)
        sums[rank] += sizes[number]
        assigned[rank].append(number)
    return [sorted(numbers) for numbers in assigned]


def empty(widths: Widths = EXACT) -> PackedBatch:
    """Return a batch without targets, for a rank that has no work left."""
    return _lay_out([_Tree((0,), ())], 0, widths)


def _trees(sequences: Sequence[TokenSequence], limit: int) -> list[_Tree]:
    by_prompt: dict[tuple[int, ...], list[tuple[int, tuple[int, ...]]]] = {}
    for number, sequence in enumerate(sequences):
        by_prompt.setdefault(sequence.prompt_ids, []).append((number, sequence.completion_ids))
    trees: list[_Tree] = []
    for prompt_ids, members in by_prompt.items():
        chosen: list[tuple[int, tuple[int, ...]]] = []
        length = len(prompt_ids)
        for member in members:
            if chosen and length + len(member[1]) > limit:
                trees.append(_Tree(prompt_ids, tuple(chosen)))
                chosen, length = [], len(prompt_ids)
            chosen.append(member)
            length += len(member[1])
        trees.append(_Tree(prompt_ids, tuple(chosen)))
    return trees


def _lay_out(trees: Sequence[_Tree], pad_id: int, widths: Widths) -> PackedBatch:
    width = widths.of(max(map(len, trees)))
    token_ids = torch.full((len(trees), width), pad_id)
    position_ids = torch.zeros((len(trees), width), dtype=torch.int64)
    segment = torch.full((len(trees), width), -1)
    predictors: list[int] = []
    targets: list[int] = []
    sequence_index: list[int] = []
    token_index: list[int] = []
    last_positions: list[int] = []
    for row, tree in enumerate(trees):
        prompt_length = start = len(tree.prompt_ids)
        token_ids[row, :start] = torch.tensor(tree.prompt_ids)
        position_ids[row, :start] = torch.arange(start)
        segment[row, :start] = 0
        origin = row * width
        for branch, (number, completion) in enumerate(tree.members, start=1):
            end = start + len(completion)
            token_ids[row, start:end] = torch.tensor(completion)
            position_ids[row, start:end] = torch.arange(prompt_length, prompt_length + len(completion))
            segment[row, start:end] = branch
            predictors += [origin + prompt_length - 1, *range(origin + start, origin + end - 1)]
            targets += completion
            sequence_index += [number] * len(completion)
            token_index += range(len(completion))
            last_positions.append(origin + end - 1)
            start = end
    members = [number for tree in trees for number, _ in tree.members]
    return PackedBatch(
        token_ids=token_ids,
        position_ids=position_ids,
        segment=segment,
        predictors=_integers(predictors),
        targets=_integers(targets),
        sequence_index=_integers(sequence_index),
        token_index=_integers(token_index),
        last_positions=_integers(last_positions),
        sequences=_integers(members),
    )


def _integers(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def tree_mask(segment: Int[Tensor, "batch time"], *, window: int | None = None) -> Bool[Tensor, "batch 1 time time"]:
    """Return the attention mask of segments [B, T] (see :class:`PackedBatch`): bool [B, 1, T, T].

    A padding position sees itself: a mask row without True would make its softmax NaN. ``window``: number of tokens of
    its own sequence that a token sees, itself included.
    """
    query, key = segment[:, :, None], segment[:, None, :]
    causal = torch.ones(segment.shape[1], segment.shape[1], dtype=torch.bool, device=segment.device).tril()
    visible = causal & ((key == query) | (key == 0)) & (query >= 0)
    if window is not None:
        position = tree_positions(segment)
        visible &= position[:, :, None] - position[:, None, :] < window
    itself = torch.eye(segment.shape[1], dtype=torch.bool, device=segment.device)
    return (visible | itself)[:, None]


def tree_positions(segment: Int[Tensor, "batch time"]) -> Int[Tensor, "batch time"]:
    """Return the position of each token in its own sequence, int64 [B, T], for segments as in :func:`tree_mask`."""
    columns = torch.arange(segment.shape[1], device=segment.device).expand_as(segment)
    begins = torch.ones_like(segment, dtype=torch.bool)
    begins[:, 1:] = segment[:, 1:] != segment[:, :-1]
    starts = columns.where(begins, 0).cummax(-1).values
    prompt_length = (segment == 0).sum(-1, keepdim=True)
    return columns.where(segment <= 0, columns - starts + prompt_length)
