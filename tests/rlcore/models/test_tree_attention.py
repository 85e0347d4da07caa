"""Attention over trees: the same as under the dense mask, in value and gradient, whatever the tree looks like."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_mask, flex_attention
from transformers import MistralConfig, MistralForCausalLM, PreTrainedModel

from rlcore.errors import ModelError
from rlcore.models import tree_attention
from rlcore.models.policy import check_head, completion_logprobs
from rlcore.models.tree_attention import TREE_ATTENTION, Tree, block_mask, layout_of, tree_attention_forward
from rlcore.packing import TokenSequence, pack, tree_mask
from tests import strategies
from tests.rlcore.models.test_policy import BOUNDS, BUDGETS, PRECISIONS, gradients, one_at_a_time, packed_loss, weight

ROWS = torch.tensor([[0, 0, 1, 2, 2, 3, 3, 3, -1], [0, 1, 1, 1, 1, -1, -1, -1, -1]])


def tree_llama(dtype: torch.dtype = torch.float32, **shape: object) -> PreTrainedModel:
    """The tiny model, as it is loaded for training."""
    model = strategies.tiny_llama(dtype=dtype, **shape)
    model.set_attn_implementation(TREE_ATTENTION)
    return model


def states(heads: int, segment: torch.Tensor, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (len(segment), heads, segment.shape[1], 8)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def test_a_layout_names_prompts_and_completions() -> None:
    assert layout_of(ROWS).trees == (Tree(0, 2, ((2, 3), (3, 5), (5, 8))), Tree(1, 1, ((1, 5),)))
    assert layout_of(ROWS).depth == 5  # prompt 2 and completion 3, prompt 1 and completion 4
    assert Tree(1, 1, ((1, 5),)).causal_pieces == ((0, 5),)  # nothing branches, so it is one sequence


@st.composite
def segments(draw: st.DrawFn) -> torch.Tensor:
    """Rows of a prompt, up to four completions and padding."""
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        lengths = draw(st.lists(st.integers(1, 5), min_size=2, max_size=5))
        rows.append([code for code, length in enumerate(lengths) for _ in range(length)])
    width = max(map(len, rows))
    return torch.tensor([row + [-1] * (width - len(row)) for row in rows])


@settings(deadline=None, max_examples=40)
@given(segment=segments(), grouped=st.booleans())
def test_pieces_equal_the_dense_mask_in_value_and_gradient(segment: torch.Tensor, grouped: bool) -> None:
    inputs = states(4, segment, 0), states(2 if grouped else 4, segment, 1), states(2 if grouped else 4, segment, 2)
    module = torch.nn.Module()
    module.num_key_value_groups = 2 if grouped else 1
    kept = (segment >= 0)[:, :, None, None]
    results = []
    for tree in (layout_of(segment), None):
        output, _ = tree_attention_forward(module, *inputs, segment[:, None, None], tree=tree, scaling=0.3)
        output = output.masked_fill(~kept, 0.0)  # what padding says is nobody's business
        results.append((output, *torch.autograd.grad(output.square().sum(), inputs)))
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-12)


@settings(deadline=None, max_examples=20)
@given(segment=segments())
def test_the_mask_of_a_gpu_says_the_same_as_the_dense_one(segment: torch.Tensor) -> None:
    rows, width = segment.shape
    ours = create_mask(block_mask(segment).mask_mod, rows, 1, width, width, device="cpu")
    assert torch.equal(ours, tree_mask(segment))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_a_gpus_kernel_computes_the_same_as_pieces(kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not compiled, FlexAttention's forward runs on a CPU too; its backward does not."""
    monkeypatch.setattr(tree_attention, "_compiled_flex", lambda: flex_attention)
    wide = torch.cat([torch.zeros(70), torch.ones(90), torch.full((60,), 2.0)]).long()[None]  # beyond a block of 128
    for segment in (ROWS, wide):
        inputs = [states(heads, segment, heads).float().detach() for heads in (4, kv_heads, kv_heads)]
        layout = replace(layout_of(segment), mask=block_mask(segment))
        flex, pieces = (
            tree_attention._KERNELS[device](*inputs, layout, 0.3).masked_fill((segment < 0)[:, :, None, None], 0.0)
            for device in ("cuda", "cpu")
        )
        torch.testing.assert_close(flex, pieces, rtol=1e-4, atol=1e-5)


@PRECISIONS
@BUDGETS
def test_gradients_equal_those_of_one_sequence_at_a_time(dtype: torch.dtype, budget: int) -> None:
    model, sequences = tree_llama(dtype), strategies.random_sequences(1, max_tokens=9)
    plain = torch.zeros((), dtype=dtype)
    for number, sequence in enumerate(sequences):
        for place, logprob in enumerate(one_at_a_time(model, sequence, temperature=0.8)):
            plain = plain + weight(number + place) * logprob
    expected = gradients(plain, model)
    ours = gradients(packed_loss(model, sequences, budget), model)
    assert float((ours - expected).norm() / expected.norm()) < BOUNDS[dtype]


def test_long_sequences_cross_the_blocks_of_the_kernel() -> None:
    model = tree_llama(max_position_embeddings=2048)
    generator = torch.Generator().manual_seed(0)
    prompt = strategies.random_tokens(700, generator)
    family = [
        TokenSequence(prompt_ids=prompt, completion_ids=strategies.random_tokens(n, generator)) for n in (600, 9, 130)
    ]
    (batch,) = pack(family, tokens_per_microbatch=4096)
    ours, _ = completion_logprobs(model, batch)
    for number, sequence in enumerate(family):
        expected = one_at_a_time(model, sequence).detach()
        torch.testing.assert_close(ours[batch.sequence_index == number].detach(), expected, rtol=1e-4, atol=2e-4)


def test_the_head_check_runs_through_it() -> None:
    check_head(tree_llama())


def test_a_window_shorter_than_a_sequence_is_refused() -> None:
    shape = {"vocab_size": 29, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    model = MistralForCausalLM(MistralConfig(**shape, **heads, sliding_window=6))
    model.set_attn_implementation(TREE_ATTENTION)
    short, long = (TokenSequence(prompt_ids=(1, 2, 3), completion_ids=(4,) * count) for count in (3, 4))
    completion_logprobs(model, pack([short], tokens_per_microbatch=100)[0])
    with pytest.raises(ModelError, match="see 6 tokens back, a sequence has 7"):
        completion_logprobs(model, pack([long], tokens_per_microbatch=100)[0])
