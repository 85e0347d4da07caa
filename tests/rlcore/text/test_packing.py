"""Packing: every completion token once, after its own context, within the budget."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlcore.text.packing import (
    PackedBatch,
    TokenSequence,
    Widths,
    empty,
    pack,
    split_across_ranks,
    tree_mask,
    tree_positions,
)

PROMPT = (7, 8, 9)
FAMILY = [
    TokenSequence(prompt_ids=PROMPT, completion_ids=(1, 2)),
    TokenSequence(prompt_ids=PROMPT, completion_ids=(3, 4, 5)),
]


@st.composite
def sequence_lists(draw: st.DrawFn) -> list[TokenSequence]:
    """Up to eight sequences over two-token prompts, some shared; token 0 (the padding id) among them."""
    tokens = st.lists(st.integers(0, 5), min_size=1, max_size=6).map(tuple)
    prompts = st.tuples(st.integers(1, 3), st.just(4))
    pairs = draw(st.lists(st.tuples(prompts, tokens), min_size=1, max_size=8))
    return [TokenSequence(prompt_ids=prompt, completion_ids=completion) for prompt, completion in pairs]


def context_of(batch: PackedBatch, position: int) -> list[int]:
    """The tokens that a flat position sees, itself included, in the order of their position ids."""
    row, column = divmod(position, batch.token_ids.shape[1])
    seen = batch.attention_mask[row, 0, column].nonzero().squeeze(1)
    order = batch.position_ids[row, seen].argsort()
    tokens: list[int] = batch.token_ids[row, seen[order]].tolist()
    return tokens


def test_family_shares_prompt() -> None:
    (batch,) = pack(FAMILY, tokens_per_microbatch=100)
    assert batch.token_ids.tolist() == [[7, 8, 9, 1, 2, 3, 4, 5]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 3, 4, 5]]
    # 1 is predicted by 9 (place 2), 2 by 1 (place 3), 3 by 9 again, 4 by 3 (place 5), 5 by 4 (place 6).
    assert batch.predictors.tolist() == [2, 3, 2, 5, 6]
    assert batch.targets.tolist() == [1, 2, 3, 4, 5]
    assert batch.sequence_index.tolist() == [0, 0, 1, 1, 1]
    assert batch.token_index.tolist() == [0, 1, 0, 1, 2]
    assert batch.last_positions.tolist() == [4, 7]
    assert batch.num_tokens == 5


def test_completion_does_not_see_sibling() -> None:
    mask = tree_mask(torch.tensor([[0, 1, 2, 2, -1]]))[0, 0]
    assert mask.int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 0, 1, 0, 0],
        [1, 0, 1, 1, 0],
        [0, 0, 0, 0, 1],  # padding sees itself: a row without any True would be NaN after the softmax
    ]


@given(sequences=sequence_lists(), budget=st.integers(1, 60))
def test_every_token_is_scored_once_after_its_context(sequences: list[TokenSequence], budget: int) -> None:
    scored, ended = [], []
    for batch in pack(sequences, tokens_per_microbatch=budget):
        assert batch.token_ids.numel() <= budget or len(batch.sequences) == 1
        columns = (batch.sequence_index, batch.token_index, batch.predictors, batch.targets)
        for number, place, predictor, target in zip(*(column.tolist() for column in columns), strict=True):
            sequence = sequences[number]
            assert target == sequence.completion_ids[place]
            assert context_of(batch, predictor) == [*sequence.prompt_ids, *sequence.completion_ids[:place]]
            scored.append((number, place))
        for number, position in zip(batch.sequences.tolist(), batch.last_positions.tolist(), strict=True):
            assert context_of(batch, position) == [*sequences[number].prompt_ids, *sequences[number].completion_ids]
            ended.append(number)
    assert sorted(ended) == list(range(len(sequences)))
    assert sorted(scored) == [(i, t) for i, s in enumerate(sequences) for t in range(len(s.completion_ids))]


def test_micro_batches_are_few_and_even() -> None:
    sequences = [TokenSequence(prompt_ids=(number, 7), completion_ids=(1, 2, 3)) for number in range(4)]
    shapes = [tuple(batch.token_ids.shape) for batch in pack(sequences, tokens_per_microbatch=15)]
    assert shapes == [(2, 5), (2, 5)]  # and not three rows, then one


def test_large_family_is_split() -> None:
    # 3 prompt tokens, then 2 + 3 + 2 + 3 + 2 + 3 completion tokens: pairs of 5 fill a row of 9.
    batches = pack(FAMILY * 3, tokens_per_microbatch=9)
    assert [batch.token_ids.tolist() for batch in batches] == [[[*PROMPT, 1, 2, 3, 4, 5]]] * 3
    assert [batch.sequences.tolist() for batch in batches] == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize(
    "bad", [TokenSequence(prompt_ids=(), completion_ids=(1,)), TokenSequence(prompt_ids=(1,), completion_ids=())]
)
def test_empty_prompt_or_completion_is_refused(bad: TokenSequence) -> None:
    with pytest.raises(ValueError, match="sequence 1 has an empty prompt or completion"):
        pack([FAMILY[0], bad], tokens_per_microbatch=10)


def test_one_completion_per_row_without_sharing() -> None:
    (batch,) = pack(FAMILY, tokens_per_microbatch=100, share_prompts=False)
    assert batch.token_ids.tolist() == [[7, 8, 9, 3, 4, 5], [7, 8, 9, 1, 2, 0]]
    assert batch.sequences.tolist() == [1, 0]
    assert not batch.shares_prompts
    assert pack(FAMILY, tokens_per_microbatch=100)[0].shares_prompts


def test_rows_are_padded_to_widths() -> None:
    widths = Widths(multiple=4, minimum=8)
    assert [widths.of(length) for length in (1, 8, 9, 12, 13)] == [8, 8, 12, 12, 16]
    alone = {"share_prompts": False, "widths": widths}
    assert [batch.token_ids.shape for batch in pack(FAMILY, tokens_per_microbatch=16, **alone)] == [(2, 8)]
    assert [batch.token_ids.shape for batch in pack(FAMILY, tokens_per_microbatch=15, **alone)] == [(1, 8), (1, 8)]


def test_window_counts_positions_of_own_sequence() -> None:
    # p0 p1 | a2 a3 | b2 b3 | padding: the place of b2 is 2, though it stands fifth in the row.
    segment = torch.tensor([[0, 0, 1, 1, 2, 2, -1]])
    assert tree_positions(segment)[0, :6].tolist() == [0, 1, 2, 3, 2, 3]
    assert tree_mask(segment, window=2)[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [0, 1, 1, 0, 0, 0, 0],
        [0, 0, 1, 1, 0, 0, 0],
        [0, 1, 0, 0, 1, 0, 0],
        [0, 0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 0, 1],
    ]


@given(sequence_lists(), st.integers(1, 5), st.integers(1, 30), st.booleans())
def test_every_sequence_goes_to_one_rank(
    sequences: list[TokenSequence], ranks: int, budget: int, share_prompts: bool
) -> None:
    dealt = split_across_ranks(sequences, ranks, tokens_per_microbatch=budget, share_prompts=share_prompts)
    assert len(dealt) == ranks
    assert sorted(number for numbers in dealt for number in numbers) == list(range(len(sequences)))
    assert all(numbers == sorted(numbers) for numbers in dealt)


def test_longest_tree_goes_first() -> None:
    # Trees of 9, 6, 5 and 4 tokens: 9 | 6, then 5 to the second (11), and 4 to the first (13).
    sequences = [TokenSequence(prompt_ids=(n,), completion_ids=(1,) * length) for n, length in enumerate((3, 8, 4, 5))]
    assert split_across_ranks(sequences, 2, tokens_per_microbatch=100) == [[0, 1], [2, 3]]


def test_oversized_prompt_is_split_over_ranks() -> None:
    sequences = [TokenSequence(prompt_ids=(1,), completion_ids=(2,) * 10) for _ in range(4)]
    assert [len(numbers) for numbers in split_across_ranks(sequences, 2, tokens_per_microbatch=1000)] == [2, 2]


def tokens_of(sequences: Sequence[TokenSequence]) -> int:
    prompts = {sequence.prompt_ids for sequence in sequences}
    return sum(len(sequence.completion_ids) for sequence in sequences) + sum(map(len, prompts))


def groups_of_eight(seed: int) -> list[TokenSequence]:
    """64 groups with long tails: lengths of exp(N(6, 0.8)), up to 4,096."""
    draws = random.Random(seed)
    return [
        TokenSequence(prompt_ids=prompt, completion_ids=(1,) * min(4096, int(math.exp(draws.gauss(6.0, 0.8)))))
        for prompt in [(group,) * draws.randint(50, 300) for group in range(64)]
        for _ in range(8)
    ]


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_ranks_are_balanced(ranks: int) -> None:
    """Over five draws of lengths; docs/scaling.md has the figures."""
    above = []
    for seed in range(5):
        sequences = groups_of_eight(seed)
        dealt = split_across_ranks(sequences, ranks, tokens_per_microbatch=16384)
        loads = [tokens_of([sequences[number] for number in numbers]) for numbers in dealt]
        above.append(max(loads) / (sum(loads) / ranks) - 1.0)
    assert sum(above) / len(above) <= 0.05


def test_empty_batch() -> None:
    batch = empty(Widths(multiple=4, minimum=8))
    assert batch.token_ids.shape == (1, 8)
    assert batch.segment.tolist() == [[0] + [-1] * 7]
    assert batch.num_tokens == len(batch.sequences) == len(batch.last_positions) == 0
    assert not batch.shares_prompts
