"""Packed sequences: trees, masks and batches give the log-probabilities and gradients of single sequences."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import BlockMask, create_mask, flex_attention
from transformers import (
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    PreTrainedModel,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from rlcore.config import LoraConfig
from rlcore.errors import ModelError
from rlcore.models import architectures, tree_attention
from rlcore.models import tree_attention as module
from rlcore.models.architectures import pack_for
from rlcore.models.lora import AdaptedModel, active_name, add_lora
from rlcore.models.memory_meter import measure_peak
from rlcore.models.policy import completion_logprobs, score_sequences
from rlcore.models.runtime import enable_gradient_checkpointing
from rlcore.models.tree_attention import TREE_ATTENTION, WIDTHS, Tree, block_mask, layout_of, tree_attention_forward
from rlcore.sampling.kv_cache import grouped_attention
from rlcore.text.packing import PackedBatch, TokenSequence, pack, tree_mask
from tests import strategies
from tests.largest_tensor import LargestTensor
from tests.reference.losses import one_at_a_time

BOUNDS = {torch.float32: 1e-5, torch.float64: 1e-9}
# one sequence a batch, split trees (a family of 5 + 3 * 7 does not fit), several rows with padding, all in one batch
BUDGETS = (1, 20, 70, 1000)
ROWS = torch.tensor([[0, 0, 1, 2, 2, 3, 3, 3, -1], [0, 1, 1, 1, 1, -1, -1, -1, -1]])


def gradients(loss: torch.Tensor, model: PreTrainedModel) -> torch.Tensor:
    parts = torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], retain_graph=True)
    return torch.cat([part.flatten() for part in parts])


def weighted_sum(logprobs: torch.Tensor, number: int) -> torch.Tensor:
    """A sum over the tokens of a sequence, each place with a weight of its own."""
    return ((0.3 + 0.1 * (number + torch.arange(len(logprobs)))).to(logprobs.dtype) * logprobs).sum()


def packed_logprobs(model: PreTrainedModel, sequences: list[TokenSequence], budget: int) -> list[torch.Tensor]:
    found: dict[int, torch.Tensor] = {}
    for batch in pack(sequences, tokens_per_microbatch=budget):
        logprobs, _ = completion_logprobs(model, batch, temperature=0.8)
        found |= {number: logprobs[batch.sequence_index == number] for number in batch.sequences.tolist()}
    return [found[number] for number in range(len(sequences))]


def packed_loss(model: PreTrainedModel, sequences: list[TokenSequence], budget: int) -> torch.Tensor:
    parts = [weighted_sum(each, number) for number, each in enumerate(packed_logprobs(model, sequences, budget))]
    return torch.stack(parts).sum()


def tree_llama(dtype: torch.dtype = torch.float32, **shape: object) -> PreTrainedModel:
    model = strategies.tiny_llama(dtype=dtype, **shape)
    model.set_attn_implementation(TREE_ATTENTION)
    return model


def states(heads: int, segment: torch.Tensor, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (len(segment), heads, segment.shape[1], 8)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def test_layout_of_trees() -> None:
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
def test_tree_attention_equals_dense_mask(segment: torch.Tensor, grouped: bool) -> None:
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
@pytest.mark.parametrize(("kv_heads", "window"), [(4, None), (4, 3), (2, 100)])
def test_flex_attention_equals_dense_mask(kv_heads: int, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_flex_attention_is_compiled_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the compiler gives up silently, attention runs unfused: 17 GB of scores per layer at 16,384 tokens."""
    asked: dict[str, object] = {}
    monkeypatch.setattr(torch, "compile", lambda function, **options: asked.update(options) or function)
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 8)
    assert tree_attention._compiled_flex.__wrapped__() is flex_attention
    assert asked == {"dynamic": True, "fullgraph": True}
    assert torch._dynamo.config.recompile_limit >= 64  # gpu: 13 kinds of input for two models in two precisions


def test_mask_is_made_once_per_window() -> None:
    made: list[int | None] = []

    def make(segment: torch.Tensor, *, window: int | None) -> int:
        made.append(window)
        return len(made)

    layout = layout_of(ROWS)
    assert [layout.mask(make, window) for window in (None, 3, None, 3)] == [1, 2, 1, 2]
    assert made == [None, 3]


def test_long_sequences() -> None:
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


@pytest.mark.parametrize(
    ("option", "value"),
    [("softcap", 50.0), ("s_aux", torch.ones(4)), ("position_bias", torch.ones(1)), ("dropout", 0.1)],
)
def test_unsupported_attention_options_are_refused(option: str, value: object) -> None:
    inputs = [states(4, ROWS, seed) for seed in range(3)]
    with pytest.raises(ModelError, match=option):
        tree_attention_forward(torch.nn.Module(), *inputs, ROWS[:, None, None], **{option: value})
    with pytest.raises(ModelError, match=option):
        grouped_attention(torch.nn.Module(), *inputs, None, **{option: value})


WINDOWS = st.one_of(st.none(), st.integers(1, 8))


@settings(deadline=None, max_examples=30)
@given(segment=segments(), window=WINDOWS)
def test_block_mask_rule_equals_dense_mask(segment: torch.Tensor, window: int | None) -> None:
    rows, width = segment.shape
    ours = create_mask(block_mask(segment, window=window).mask_mod, rows, 1, width, width, device="cpu")
    assert torch.equal(ours, tree_mask(segment, window=window))


def listed(count: torch.Tensor | None, order: torch.Tensor | None) -> torch.Tensor:
    """Return the blocks that are read: bool [B, N, N]."""
    assert count is not None
    assert order is not None
    first = torch.arange(order.shape[-1]) < count[:, 0, :, None]
    return torch.zeros(order[:, 0].shape, dtype=torch.bool).scatter(-1, order[:, 0].long(), first)


@settings(deadline=None, max_examples=60)
@given(segment=segments(), window=WINDOWS, block=st.integers(1, 4))
def test_block_mask_blocks_equal_dense_mask(segment: torch.Tensor, window: int | None, block: int) -> None:
    segment = torch.cat([segment, segment.new_full((len(segment), -segment.shape[1] % block), -1)], dim=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK", block)
        made: BlockMask = block_mask(segment, window=window)
    pairs = tree_mask(segment, window=window)[:, 0].unflatten(1, (-1, block)).unflatten(-1, (-1, block))
    some, every = pairs.amax((2, 4)), pairs.amin((2, 4))
    partial = listed(made.kv_num_blocks, made.kv_indices)
    whole = listed(made.full_kv_num_blocks, made.full_kv_indices)
    assert not (partial & whole).any()
    assert torch.equal((some & ~(partial | whole)), torch.zeros_like(some))
    assert torch.equal(whole & ~every, torch.zeros_like(some))
    if window is None:
        assert torch.equal(partial | whole, some)


def test_block_mask_is_never_dense() -> None:
    segment = torch.cat([torch.zeros(1, 2048), torch.ones(1, 2048)], dim=1).long()
    with LargestTensor() as largest:
        made = block_mask(segment)
    assert largest.num_elements <= 4096  # all pairs would be 16,777,216
    assert made.kv_num_blocks.tolist() == [[[1] * 32]]  # the diagonal; what is below it is visible as a whole
    assert made.full_kv_num_blocks is not None
    assert made.full_kv_num_blocks.tolist() == [[[*range(32)]]]


FAMILY = [TokenSequence(prompt_ids=(1, 2), completion_ids=(3,) * length) for length in (4, 5)]


class OnAGpu:
    """As much of a model as packing asks for."""

    device = torch.device("cuda")


def test_cpu_rows_have_own_width() -> None:
    (batch,) = pack_for(strategies.tiny_llama(), FAMILY, tokens_per_microbatch=1000)
    assert batch.token_ids.shape == (1, 11)


@pytest.mark.parametrize(("shares", "shape"), [(True, (1, 256)), (False, (2, 7))])
def test_gpu_trees_have_few_widths(shares: bool, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each width that is new may compile the kernel again; the library's attention compiles nothing."""
    monkeypatch.setattr(architectures, "supports_prompt_sharing", lambda model: shares)
    (batch,) = pack_for(OnAGpu(), FAMILY, tokens_per_microbatch=1000)
    assert batch.token_ids.shape == shape
    assert [WIDTHS.of(length) for length in (1, 256, 257, 1000)] == [256, 256, 384, 1024]


def test_cpu_passes_are_smaller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sequences = [TokenSequence(prompt_ids=(number,), completion_ids=(3,) * 499) for number in range(10)]
    on_cpu = pack_for(strategies.tiny_llama(), sequences, tokens_per_microbatch=8192)
    assert [batch.token_ids.numel() for batch in on_cpu] == [1000] * 5
    group = [TokenSequence(prompt_ids=(1,), completion_ids=(3,) * 499) for _ in range(5)]
    assert [
        batch.token_ids.numel() for batch in pack_for(strategies.tiny_llama(), group, tokens_per_microbatch=8192)
    ] == [1997, 500]
    monkeypatch.setattr(architectures, "supports_prompt_sharing", lambda model: True)
    (on_gpu,) = pack_for(OnAGpu(), sequences, tokens_per_microbatch=8192)
    assert on_gpu.token_ids.numel() == 5120


def test_scores_are_float32_per_sequence() -> None:
    sequences = strategies.random_sequences(4)
    scores = score_sequences(strategies.tiny_llama(dtype=torch.float64), sequences, tokens_per_microbatch=50)
    assert [len(score) for score in scores] == [len(sequence.completion_ids) for sequence in sequences]
    assert {(score.dtype, score.device.type, score.requires_grad) for score in scores} == {
        (torch.float32, "cpu", False)
    }


def test_prompt_positions_get_no_logits() -> None:
    vocabulary, prompt = 2000, tuple(range(60))
    model = strategies.tiny_llama(vocab_size=vocabulary)
    (batch,) = pack([TokenSequence(prompt_ids=prompt, completion_ids=(5, 2))], tokens_per_microbatch=100)
    with LargestTensor() as largest:
        completion_logprobs(model, batch)[0].sum().backward()
    embeddings = vocabulary * model.config.hidden_size
    assert largest.num_elements == embeddings  # 48,000; logits of all 62 positions would be 124,000


def test_checkpointed_gradient_is_identical() -> None:
    sequences = strategies.random_sequences(1, max_tokens=9)
    plain, again = tree_llama(), enable_gradient_checkpointing(tree_llama())
    assert torch.equal(
        gradients(packed_loss(again, sequences, 70), again), gradients(packed_loss(plain, sequences, 70), plain)
    )


def test_checkpointing_keeps_fewer_activations() -> None:
    sequences = strategies.random_sequences(1, num_prompts=8, group_size=4, max_tokens=30)
    kept = []
    for model in (tree_llama(num_hidden_layers=6), enable_gradient_checkpointing(tree_llama(num_hidden_layers=6))):
        with measure_peak([model], []) as meter:
            (batch,) = pack(sequences, tokens_per_microbatch=10_000)
            completion_logprobs(model, batch)[0].sum().backward()
        kept.append(meter.activations)
    assert kept[1] < 0.5 * kept[0]


def test_checkpointing_keeps_dropout_off() -> None:
    config = GPT2Config(vocab_size=29, n_embd=24, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0.9, attn_pdrop=0.9)
    model = enable_gradient_checkpointing(GPT2LMHeadModel(config).eval())
    ids = torch.tensor([[1, 2, 3, 4]])
    assert torch.equal(model(ids, use_cache=False).logits, model(ids, use_cache=False).logits)


def test_copy_in_eval_mode_uses_cache() -> None:
    copied = copy.deepcopy(enable_gradient_checkpointing(tree_llama())).eval()
    cache = DynamicCache(config=copied.config)
    copied(torch.tensor([[1, 2, 3]]), use_cache=True, past_key_values=cache)
    assert cache.get_seq_length() == 3


def test_architecture_without_checkpointing_is_refused() -> None:
    model = strategies.tiny_llama()
    model.supports_gradient_checkpointing = False
    with pytest.raises(ModelError, match="gradient_checkpointing = false"):
        enable_gradient_checkpointing(model)


def with_adapter(base: LlamaForCausalLM, name: str) -> AdaptedModel:
    """An adapter that changes something."""
    model = add_lora(base, LoraConfig(rank=3), name, seed=0)
    generator = torch.Generator().manual_seed(len(name))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


BETWEEN: dict[str, Callable[[AdaptedModel, AdaptedModel, PackedBatch], object]] = {
    "another adapter": lambda policy, other, batch: completion_logprobs(other, batch),
    "the reference": lambda policy, other, batch: completion_logprobs(AdaptedModel(policy.base, ""), batch),
}


@pytest.mark.parametrize(("between", "twice"), [("another adapter", True), ("the reference", False)])
def test_recomputation_uses_adapter_of_forward_pass(between: str, twice: bool) -> None:
    (batch,) = pack(strategies.random_sequences(1, max_tokens=9), tokens_per_microbatch=10_000)
    found = []
    for base in (tree_llama(), enable_gradient_checkpointing(tree_llama())):
        policy, other = with_adapter(base, "policy"), with_adapter(base, "critics")
        loss = completion_logprobs(policy, batch)[0].sum()
        BETWEEN[between](policy, other, batch)
        before = active_name(base)
        for _ in range(1 + twice):
            loss.backward(retain_graph=True)
        assert active_name(base) == before  # the next pass finds what it left
        assert all(parameter.grad is None for parameter in other.parameters())
        found.append(torch.cat([parameter.grad.flatten() for parameter in policy.parameters()]))
    assert float(found[0].norm()) > 0.1
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("attention", "dtype", "budget"),
    [
        *((TREE_ATTENTION, torch.float64, each) for each in BUDGETS),
        (TREE_ATTENTION, torch.float32, 70),
        ("sdpa", torch.float64, 70),
    ],
)
def test_packed_sequences_equal_single_sequences(attention: str, dtype: torch.dtype, budget: int) -> None:
    model, sequences = strategies.tiny_llama(dtype=dtype), strategies.random_sequences(0, max_tokens=9)
    expected = [one_at_a_time(model, each, temperature=0.8) for each in sequences]
    exact = gradients(torch.stack([weighted_sum(each, n) for n, each in enumerate(expected)]).sum(), model)
    model.set_attn_implementation(attention)
    for ours, theirs in zip(packed_logprobs(model, sequences, budget), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=BOUNDS[dtype], atol=BOUNDS[dtype])
    found = gradients(packed_loss(model, sequences, budget), model)
    assert float((found - exact).norm() / exact.norm()) < BOUNDS[dtype]
