"""Attention over trees, cached decoding and adapted layers in half precision, token by token against float64.

Each is compared with what anybody would call on the same numbers: the library's attention under a dense mask, a linear
layer with a low-rank addition under autocast, the whole sequence computed at once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch.nn import functional
from transformers import PreTrainedModel

from rlcore.hardware.precision import set_compute_dtype
from rlcore.models.lora import low_rank_linear
from rlcore.models.policy import completion_logprobs
from rlcore.models.tree_attention import layout_of, tree_attention_forward
from rlcore.sampling.decoding import decode, sample_tokens
from rlcore.sampling.kv_cache import GROUPED_ATTENTION
from rlcore.text.packing import TokenSequence, pack, tree_mask
from tests import strategies
from tests.rlcore.models.test_tree_attention import tree_llama

NUM_TOKENS = 24
HALVES = [torch.bfloat16, torch.float16]
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

SEGMENT = torch.tensor(
    [[0] * 20 + [1] * 15 + [2] * 25 + [3] * 9 + [-1] * 3, [0] * 30 + [1] * 10 + [2] * 12 + [-1] * 20]
)
KEPT = (SEGMENT >= 0)[:, None, :, None]


def by_trees(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    module, layout = torch.nn.Module(), layout_of(SEGMENT)
    output, _ = tree_attention_forward(module, query, key, value, SEGMENT[:, None, None], tree=layout, scaling=None)
    return output.transpose(1, 2)


def by_dense_mask(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=tree_mask(SEGMENT))


def attended(attention: Attention, dtype: torch.dtype, states: list[torch.Tensor]) -> list[torch.Tensor]:
    """Output and gradients of query, key and value in ``dtype``, as float64; padding is nobody's business."""
    inputs = [each.to(dtype).requires_grad_() for each in states[:3]]
    output = attention(*inputs)
    gradients = torch.autograd.grad(output, inputs, (states[3] * KEPT).to(dtype))
    return [each.detach().double() * KEPT for each in (output, *gradients)]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("sharpness", [1.0, 3.0, 8.0])
def test_trees_round_no_more_than_the_librarys_attention(dtype: torch.dtype, sharpness: float) -> None:
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(2, 4, 72, 32, generator=generator) for _ in range(4)]
    states = [(states[0] * sharpness).to(dtype), *(each.to(dtype) for each in states[1:])]
    exact = attended(by_dense_mask, torch.float64, states)
    ours, theirs = attended(by_trees, dtype, states), attended(by_dense_mask, dtype, states)
    unit = torch.finfo(dtype).eps
    of_tokens = (ours[0] - exact[0]).norm(dim=-1) / exact[0].norm(dim=-1).clamp(min=1e-3)
    assert float(of_tokens.max()) < unit  # merged in float32 and rounded once
    for mine, other, true in zip(ours, theirs, exact, strict=True):
        assert float((mine - true).norm()) < 1.6 * float((other - true).norm()) + 1e-3 * unit * float(true.norm())


def adapted(layer: Callable[..., torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """Output, and gradients of inputs, A and B; the adapter's weights are float32 and the base is ``dtype``."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((200, 64), (96, 64), (8, 64), (96, 8))
    inputs, weight, down, up = (torch.randn(shape, generator=generator).to(torch.bfloat16) for shape in shapes)
    gradient = torch.randn(200, 96, generator=generator).to(torch.bfloat16)
    learned = torch.float64 if dtype == torch.float64 else torch.float32
    leaves = [inputs.to(dtype), down.to(learned), up.to(learned)]
    for leaf in leaves:
        leaf.requires_grad_()
    output = layer(leaves[0], weight.to(dtype), None, leaves[1], leaves[2], 2.0)
    gradients = torch.autograd.grad(output, leaves, gradient.to(output.dtype))
    return [output.detach().double(), *(each.double() for each in gradients)]


def written_out(
    inputs: torch.Tensor, weight: torch.Tensor, bias: None, down: torch.Tensor, up: torch.Tensor, scaling: float
) -> torch.Tensor:
    return functional.linear(inputs, weight) + scaling * functional.linear(functional.linear(inputs, down), up)


@pytest.mark.parametrize("dtype", HALVES)
def test_no_row_of_an_adapted_layer_rounds_more_than_under_autocast(dtype: torch.dtype) -> None:
    exact, ours = adapted(written_out, torch.float64), adapted(low_rank_linear, dtype)
    with torch.autocast("cpu", dtype=dtype, cache_enabled=False):
        theirs = adapted(written_out, dtype)

    def worst(found: list[torch.Tensor]) -> list[float]:
        pairs = zip(found, exact, strict=True)
        return [float(((each - true).norm(dim=-1) / true.norm(dim=-1)).max()) for each, true in pairs]

    assert all(mine <= 1.1 * other for mine, other in zip(worst(ours), worst(theirs), strict=True))


def decoded_tokens(dtype: torch.dtype, temperature: float) -> tuple[list[TokenSequence], torch.Tensor]:
    """Sixteen completions of four prompts, two of one length, and the log-probabilities that the engine reports."""
    engine = tree_llama(initializer_range=0.3).to(dtype)
    engine.set_attn_implementation(GROUPED_ATTENTION)
    generator = torch.Generator().manual_seed(0)
    prompts = [strategies.random_tokens(length, generator) for length in (3, 3, 9, 14) for _ in range(4)]
    uniforms = torch.rand(len(prompts), NUM_TOKENS, generator=generator)
    choose = partial(sample_tokens, temperature=temperature)
    with torch.inference_mode():
        decoded = decode(engine, prompts, uniforms, choose=choose, eos_ids=torch.tensor([-1]))
    rows = zip(prompts, decoded.tokens.tolist(), strict=True)
    return [TokenSequence(prompt_ids=prompt, completion_ids=tuple(row)) for prompt, row in rows], decoded.logprobs


def trained(model: PreTrainedModel, sequences: list[TokenSequence], temperature: float) -> torch.Tensor:
    """Return the trainer's log-probabilities of the same tokens, [S, T]."""
    found = torch.zeros(len(sequences), NUM_TOKENS)
    for batch in pack(sequences, tokens_per_microbatch=512):
        logprobs, _ = completion_logprobs(model, batch, temperature=temperature)
        found[batch.sequence_index, batch.token_index] = logprobs.detach()
    return found


@torch.no_grad()
def whole(sequences: list[TokenSequence], temperature: float, dtype: torch.dtype) -> torch.Tensor:
    """The library's own forward pass of each sequence, with weights in ``dtype`` and eager attention."""
    model = strategies.tiny_llama(dtype=dtype, initializer_range=0.3)
    model.set_attn_implementation("eager")
    rows = []
    for sequence in sequences:
        tokens = torch.tensor([[*sequence.prompt_ids, *sequence.completion_ids]])
        logits = model(tokens).logits[0, len(sequence.prompt_ids) - 1 : -1].double() / temperature
        rows.append(logits.log_softmax(-1).gather(-1, torch.tensor(sequence.completion_ids)[:, None])[:, 0])
    return torch.stack(rows)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("temperature", [0.7, 1.6])
def test_cached_decoding_and_training_round_no_more_than_the_librarys_forward_pass(
    dtype: torch.dtype, temperature: float
) -> None:
    sequences, reported = decoded_tokens(dtype, temperature)
    trainer = set_compute_dtype(tree_llama(initializer_range=0.3), dtype)
    exact, plain = (whole(sequences, temperature, each) for each in (torch.float64, dtype))
    ours = {"engine": reported, "trainer": trained(trainer, sequences, temperature)}
    usual = (plain - exact).abs()
    for name, logprobs in ours.items():
        error = (logprobs - exact).abs()
        # The sum over 384 tokens of a heavy-tailed error: two plain passes differ by as much in their last bits.
        assert float(error.mean()) < 1.3 * float(usual.mean()), name
        assert float(error.max()) < 3.0 * float(usual.max()), name


@pytest.mark.parametrize("temperature", [0.7, 1.6])
def test_in_float32_engine_and_trainer_agree_to_rounding(temperature: float) -> None:
    sequences, reported = decoded_tokens(torch.float32, temperature)
    difference = (trained(tree_llama(initializer_range=0.3), sequences, temperature) - reported).abs()
    assert float(difference.max()) < 1e-4
