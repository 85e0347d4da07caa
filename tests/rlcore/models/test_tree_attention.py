"""Attention over trees: the same as under the dense mask, in value and gradient, whatever the tree looks like."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import flex_attention
from transformers import MistralConfig, MistralForCausalLM, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from rlcore.errors import ModelError
from rlcore.models import tree_attention
from rlcore.models.policy import completion_logprobs
from rlcore.models.tree_attention import TREE_ATTENTION, Tree, layout_of, tree_attention_forward
from rlcore.sampling.kv_cache import grouped_attention
from rlcore.text.packing import TokenSequence, pack, tree_mask
from tests import strategies
from tests.rlcore.models.packed import (
    BOUNDS,
    BUDGETS,
    PRECISIONS,
    gradient_error,
    gradients,
    one_at_a_time,
    weight,
)

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
    for mask in (segment[:, None, None], tree_mask(segment)):
        output, _ = tree_attention_forward(module, *inputs, mask, tree=layout_of(segment), scaling=0.3)
        output = output.masked_fill(~kept, 0.0)  # what padding says is nobody's business
        results.append((output, *torch.autograd.grad(output.square().sum(), inputs)))
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-12)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [None, 3, 100])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_a_gpus_kernel_computes_the_same_as_the_dense_mask(
    kv_heads: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not compiled, FlexAttention's forward runs on a CPU too; its backward does not."""
    monkeypatch.setattr(tree_attention, "_compiled_flex", lambda: flex_attention)
    wide = torch.cat([torch.zeros(70), torch.ones(90), torch.full((60,), 2.0)]).long()[None]  # beyond a block of 128
    module = torch.nn.Module()
    module.num_key_value_groups = 4 // kv_heads
    for segment in (ROWS, wide):
        inputs = [states(heads, segment, heads).float().detach() for heads in (4, kv_heads, kv_heads)]
        ours = tree_attention._by_flex(*inputs, layout_of(segment), scale=0.3, window=window)
        dense, _ = sdpa_attention_forward(module, *inputs, tree_mask(segment, window=window), scaling=0.3)
        kept = (segment >= 0)[:, :, None, None]
        torch.testing.assert_close(ours.masked_fill(~kept, 0.0), dense.masked_fill(~kept, 0.0), rtol=1e-4, atol=1e-5)


def test_a_gpus_kernel_is_compiled_whole_and_for_every_shape_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the compiler gives up silently, attention runs unfused: 17 GB of scores per layer at 16,384 tokens."""
    asked: dict[str, object] = {}
    monkeypatch.setattr(torch, "compile", lambda function, **options: asked.update(options) or function)
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 8)
    assert tree_attention._compiled_flex.__wrapped__() is flex_attention
    assert asked == {"dynamic": True, "fullgraph": True}
    assert torch._dynamo.config.recompile_limit >= 64  # gpu: 13 kinds of input for two models in two precisions


def test_a_layer_makes_a_mask_once_for_all_layers_of_its_window() -> None:
    made: list[int | None] = []

    def make(segment: torch.Tensor, *, window: int | None) -> int:
        made.append(window)
        return len(made)

    layout = layout_of(ROWS)
    assert [layout.mask(make, window) for window in (None, 3, None, 3)] == [1, 2, 1, 2]
    assert made == [None, 3]


@PRECISIONS
@BUDGETS
def test_gradients_equal_those_of_one_sequence_at_a_time(dtype: torch.dtype, budget: int) -> None:
    assert gradient_error(tree_llama(dtype), budget) < BOUNDS[dtype]


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


def mistral(window: int) -> PreTrainedModel:
    shape = {"vocab_size": 29, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(**shape, **heads, sliding_window=window, initializer_range=0.4)).eval()


@pytest.mark.parametrize("window", [1, 4, 6, 40])
def test_a_window_counts_the_tokens_of_its_own_sequence(window: int) -> None:
    """In the row, other completions stand in between."""
    model, sequences = mistral(window), strategies.random_sequences(2, max_tokens=12)
    model.set_attn_implementation("eager")
    plain = torch.zeros(())
    expected = [one_at_a_time(model, sequence) for sequence in sequences]
    for number, logprobs in enumerate(expected):
        plain = plain + sum(weight(number + place) * logprob for place, logprob in enumerate(logprobs))
    exact = gradients(plain, model)
    model.set_attn_implementation(TREE_ATTENTION)
    ours, loss = torch.zeros(()), torch.zeros(())
    for batch in pack(sequences, tokens_per_microbatch=100):
        ours, _ = completion_logprobs(model, batch)
        for number in batch.sequences.tolist():
            own = ours[batch.sequence_index == number]
            torch.testing.assert_close(own, expected[number], rtol=1e-5, atol=1e-5)
            loss = loss + sum(weight(number + place) * logprob for place, logprob in enumerate(own))
    packed = gradients(loss, model)
    assert float((packed - exact).norm() / exact.norm()) < 1e-5


@pytest.mark.parametrize(
    ("option", "value"),
    [("softcap", 50.0), ("s_aux", torch.ones(4)), ("position_bias", torch.ones(1)), ("dropout", 0.1)],
)
def test_what_is_not_computed_is_refused(option: str, value: object) -> None:
    inputs = [states(4, ROWS, seed) for seed in range(3)]
    with pytest.raises(ModelError, match=option):
        tree_attention_forward(torch.nn.Module(), *inputs, ROWS[:, None, None], **{option: value})
    with pytest.raises(ModelError, match=option):
        grouped_attention(torch.nn.Module(), *inputs, None, **{option: value})
