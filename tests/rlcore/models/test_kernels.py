"""Kernels: log-probabilities, losses and adapted layers equal the plain formula, in half precision too."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional
from transformers import PreTrainedModel

from rlcore.hardware.precision import at_least_float32, set_compute_dtype
from rlcore.models import logprobs as products
from rlcore.models.logprobs import chunked_logprobs, fits, fused_loss, target_logprobs
from rlcore.models.lora import low_rank_linear
from rlcore.models.policy import completion_logprobs
from rlcore.models.tree_attention import layout_of, tree_attention_forward
from rlcore.sampling.decoding import decode, sample_tokens
from rlcore.sampling.kv_cache import GROUPED_ATTENTION
from rlcore.text.packing import TokenSequence, pack, tree_mask
from tests import strategies
from tests.largest_tensor import LargestTensor
from tests.rlcore.models.test_attention import tree_llama

NUM_TOKENS, HIDDEN, VOCABULARY = 13, 6, 17


def problem(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(NUM_TOKENS, HIDDEN, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    head = torch.randn(VOCABULARY, HIDDEN, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    return hidden, head, torch.randint(0, VOCABULARY, (NUM_TOKENS,), generator=generator)


def full(
    hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by the whole table of log-probabilities."""
    table = (hidden @ head.T / temperature).log_softmax(-1)
    return table[torch.arange(NUM_TOKENS), targets], -(table.exp() * table).sum(-1)


@pytest.mark.parametrize("chunk_size", [1, 4, 13, 1024])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_chunked_logprobs_equal_full_softmax(chunk_size: int, temperature: float) -> None:
    hidden, head, targets = problem()
    ours = chunked_logprobs(
        hidden, head, targets, temperature=temperature, chunk_size=chunk_size, entropy_gradient=True
    )
    theirs = full(hidden, head, targets, temperature)
    weights = torch.linspace(-1, 1, NUM_TOKENS, dtype=torch.float64)
    gradients = [
        torch.autograd.grad((weights * (logprobs + 0.3 * entropy)).sum(), (hidden, head))
        for logprobs, entropy in (ours, theirs)
    ]
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)


def test_entropy_has_no_gradient_by_default() -> None:
    hidden, head, targets = problem()
    logprobs, entropy = chunked_logprobs(hidden, head, targets, chunk_size=5)
    assert logprobs.requires_grad
    assert not entropy.requires_grad
    torch.testing.assert_close(entropy, full(hidden, head, targets, 1.0)[1].detach())


def test_half_precision_states_give_float32_log_probabilities() -> None:
    hidden, head, targets = problem(torch.bfloat16)
    logprobs, entropy = chunked_logprobs(hidden, head, targets)
    assert (logprobs.dtype, entropy.dtype) == (torch.float32, torch.float32)
    assert at_least_float32(torch.zeros(1, dtype=torch.float64)).dtype == torch.float64


def test_logprobs_of_extreme_logits_are_finite() -> None:
    hidden = torch.tensor([[1e4], [-1e4]])
    logprobs, entropy = chunked_logprobs(hidden, torch.tensor([[1.0], [0.0], [-1.0]]), torch.tensor([0, 0]))
    assert logprobs.tolist() == [0.0, -20000.0]
    assert entropy.tolist() == pytest.approx([0.0, 0.0], abs=1e-2)


def test_logprobs_never_hold_full_table() -> None:
    num_tokens, chunk_size, vocabulary = 512, 16, 1000
    hidden = torch.randn(num_tokens, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    head = torch.randn(vocabulary, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
    with LargestTensor() as largest:
        logprobs, entropy = chunked_logprobs(
            hidden, head, torch.zeros(num_tokens, dtype=torch.int64), chunk_size=chunk_size, entropy_gradient=True
        )
        (logprobs + entropy).sum().backward()
    assert hidden.grad is not None
    assert largest.num_elements == chunk_size * vocabulary  # 16,000 and not 512,000


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_target_logprobs_equal_chunked(dtype: torch.dtype, temperature: float) -> None:
    hidden, head, targets = problem(dtype)
    for chunk_size in (4, 1024):
        options = {"temperature": temperature, "chunk_size": chunk_size}
        alone = target_logprobs(hidden, head, targets, **options)
        assert not alone.requires_grad
        assert torch.equal(alone, chunked_logprobs(hidden, head, targets, **options)[0].detach())


LENGTHS = (4, 1, 5, 3)  # their sum is NUM_TOKENS
WEIGHTS = torch.linspace(-1, 1, NUM_TOKENS, dtype=torch.float64)


def weighted(places: slice, logprobs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
    """Not linear in the log-probabilities, and of the entropy as well, which carries no gradient."""
    weights = WEIGHTS[places].to(logprobs.dtype)
    return (weights * (logprobs - 0.1 * logprobs.square()) + 0.3 * weights * entropy).sum()


def both(temperature: float, dtype: torch.dtype) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Loss and gradients, fused and through the full table."""
    hidden, head, targets = problem(dtype)
    ours = fused_loss(hidden, head, targets, weighted, lengths=LENGTHS, temperature=temperature)
    logprobs, entropy = full(hidden, head, targets, temperature)
    theirs = weighted(slice(None), logprobs, entropy.detach())
    return tuple((loss.detach(), *torch.autograd.grad(2.0 * loss, (hidden, head))) for loss in (ours, theirs))  # type: ignore[return-value]


@pytest.mark.parametrize("chunk_size", [1, 6, 13, 1024])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_fused_loss_equals_full_softmax(chunk_size: int, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_ROWS", chunk_size)
    ours, theirs = both(temperature, torch.float64)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_chunks_hold_whole_sequences() -> None:
    seen = []

    def note(places: slice, logprobs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        seen.append((places.start, places.stop))
        return logprobs.sum()

    hidden, head, targets = problem()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "_ROWS", 6)
        patch.setattr(products, "CHUNK_SIZE", 6)
        fused_loss(hidden, head, targets, note, lengths=LENGTHS)
        assert fits(LENGTHS)
        assert not fits((7,))
    assert seen == [(0, 5), (5, 10), (10, 13)]  # 4 + 1, then 5 (with 3 it were 8), then 3


def test_fused_loss_with_frozen_head() -> None:
    hidden, head, targets = problem()
    (expected,) = torch.autograd.grad(fused_loss(hidden, head, targets, weighted, lengths=LENGTHS), hidden)
    frozen = head.detach()
    (ours,) = torch.autograd.grad(fused_loss(hidden, frozen, targets, weighted, lengths=LENGTHS), hidden)
    assert torch.equal(ours, expected)


def test_fused_loss_holds_one_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_ROWS", 16)
    hidden = torch.randn(512, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    head = torch.randn(1000, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
    with LargestTensor() as largest:
        fused_loss(
            hidden, head, torch.zeros(512, dtype=torch.int64), lambda _, p, __: p.sum(), lengths=(8,) * 64
        ).backward()
    assert largest.num_elements == 16 * 1000  # and not 512 * 1000


def test_fused_loss_of_extreme_logits_is_finite() -> None:
    hidden = torch.tensor([[1e4], [-1e4]], requires_grad=True)
    head = torch.tensor([[1.0], [0.0], [-1.0]], requires_grad=True)
    seen = []

    def note(_: slice, logprobs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        seen.append((logprobs.tolist(), entropy.tolist()))
        return logprobs.sum()

    loss = fused_loss(hidden, head, torch.tensor([0, 0]), note, lengths=(1, 1))
    loss.backward()
    # Second row: ln p = -20000, and d ln p / dh = 1 - (-1) = 2.
    assert seen[0][0] == [0.0, -20000.0]
    assert seen[0][1] == pytest.approx([0.0, 0.0], abs=1e-2)
    assert hidden.grad is not None
    assert hidden.grad.tolist() == [[0.0], [2.0]]


HALVES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_entropy_of_confident_policy(dtype: torch.dtype) -> None:
    # Two likely tokens and many that share a thousandth, logits that half precision holds: H = 0.0016 and the like.
    gaps = torch.tensor([6.0, 7.0, 8.0, 10.0, 14.0])
    head = torch.zeros(3, 5)
    head[0] = gaps
    exact = torch.stack([torch.distributions.Categorical(logits=row.double()).entropy() for row in (head.T)])
    entropies: list[torch.Tensor] = []

    def note(places: slice, logprobs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        entropies.append(entropy)
        return logprobs.sum()

    fused_loss(torch.eye(5).requires_grad_(), head, torch.zeros(5, dtype=torch.int64), note, lengths=(5,), dtype=dtype)
    assert float(exact.min()) < 5e-5
    torch.testing.assert_close(entropies[0].double(), exact, rtol=0.1, atol=0.0)


NUM_DECODED = 24
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
@pytest.mark.parametrize("sharpness", [1.0, 8.0])
def test_tree_attention_in_half_precision(dtype: torch.dtype, sharpness: float) -> None:
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


def decoded_tokens(dtype: torch.dtype, temperature: float) -> tuple[list[TokenSequence], torch.Tensor]:
    """Sixteen completions of four prompts, two of one length, and the log-probabilities that the engine reports."""
    engine = tree_llama(initializer_range=0.3).to(dtype)
    engine.set_attn_implementation(GROUPED_ATTENTION)
    generator = torch.Generator().manual_seed(0)
    prompts = [strategies.random_tokens(length, generator) for length in (3, 3, 9, 14) for _ in range(4)]
    uniforms = torch.rand(len(prompts), NUM_DECODED, generator=generator)
    choose = partial(sample_tokens, temperature=temperature)
    with torch.inference_mode():
        decoded = decode(engine, prompts, uniforms, choose=choose, eos_ids=torch.tensor([-1]))
    rows = zip(prompts, decoded.tokens.tolist(), strict=True)
    return [TokenSequence(prompt_ids=prompt, completion_ids=tuple(row)) for prompt, row in rows], decoded.logprobs


def trained(model: PreTrainedModel, sequences: list[TokenSequence], temperature: float) -> torch.Tensor:
    found = torch.zeros(len(sequences), NUM_DECODED)
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


@pytest.mark.parametrize(("dtype", "temperature"), [(torch.bfloat16, 0.7), (torch.float16, 1.6)])
def test_decoding_and_training_in_half_precision(dtype: torch.dtype, temperature: float) -> None:
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


Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]


def low_rank_problem(*leading: int, with_bias: bool = False, dtype: torch.dtype = torch.float64) -> Tensors:
    """Inputs of width 5 with a gradient, weight and bias of 7 outputs, A and B of rank 2 with gradients."""
    generator = torch.Generator().manual_seed(len(leading))

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    bias = draw(7) if with_bias else None
    return (
        draw(*leading, 5).requires_grad_(),
        draw(7, 5),
        bias,
        draw(2, 5).requires_grad_(),
        draw(7, 2).requires_grad_(),
    )


def low_rank_formula(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, down: torch.Tensor, up: torch.Tensor
) -> torch.Tensor:
    """With a scaling of 1.5."""
    output = inputs @ weight.T + 1.5 * (inputs @ down.T) @ up.T
    return output if bias is None else output + bias


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.booleans())
def test_low_rank_linear_equals_formula(leading: list[int], with_bias: bool) -> None:
    tensors = low_rank_problem(*leading, with_bias=with_bias)
    learned = (tensors[0], tensors[3], tensors[4])
    ours, theirs = low_rank_linear(*tensors, 1.5), low_rank_formula(*tensors)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    weights = torch.linspace(-1.0, 1.0, ours.numel(), dtype=torch.float64).reshape(ours.shape)
    gradients = [torch.autograd.grad((weights * output).sum(), learned) for output in (ours, theirs)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


def test_low_rank_linear_without_input_gradient() -> None:
    inputs, weight, bias, down, up = low_rank_problem(3)
    output = low_rank_linear(inputs.detach(), weight, bias, down, up, 1.5)
    output.sum().backward()
    assert inputs.grad is None
    assert down.grad is not None and up.grad is not None


def test_small_addition_is_not_rounded_away() -> None:
    """A thousandth of an output: below the spacing of bfloat16 around 1, which is 0.008."""
    inputs, weight = torch.ones(1, 1), torch.ones(1, 1, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = low_rank_linear(inputs, weight, None, torch.ones(1, 1), torch.full((1, 1), 1e-3), 1.0)
    assert output.item() == pytest.approx(1.001, abs=1e-5)
    narrow = low_rank_linear(inputs.bfloat16(), weight, None, torch.ones(1, 1), torch.full((1, 1), 1e-3), 1.0)
    assert (narrow.dtype, narrow.item()) == (
        torch.bfloat16,
        1.0,
    )  # without autocast all is in half precision, as in vLLM
