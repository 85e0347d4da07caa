"""Decoding draws from the tempered distribution, and is that of plain forward passes and of the library."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

from rlcore.sampling import decoding
from rlcore.sampling.decoding import Decoded, argmax_tokens, decode, decode_by_library, sample_tokens
from rlcore.sampling.kv_cache import GROUPED_ATTENTION

NO_EOS = torch.tensor([], dtype=torch.int64)

PROMPTS = [(5, 6, 7, 8, 9, 10, 11), (12, 13), (5, 6, 7, 8, 9, 10, 11), (14, 15, 16)]


def test_a_draw_inverts_the_cumulative_distribution() -> None:
    # probabilities 0.5, 0, 0.3, 0.2: cumulative 0.5, 0.5, 0.8, 1
    logits = torch.tensor([0.5, 0.0, 0.3, 0.2]).log().expand(6, 4)
    uniforms = torch.tensor([0.0, 0.49, 0.51, 0.79, 0.81, 1 - 2**-24])
    tokens, logprobs = sample_tokens(logits, uniforms, temperature=1.0)
    assert tokens.tolist() == [0, 0, 2, 2, 3, 3]
    assert logprobs.tolist() == pytest.approx([math.log(p) for p in (0.5, 0.5, 0.3, 0.3, 0.2, 0.2)], abs=1e-6)


def test_a_draw_is_of_the_tempered_distribution() -> None:
    # temperature 0.5 squares and renormalises 0.5, 0.3, 0.2: 0.25 / 0.38, 0.09 / 0.38, 0.04 / 0.38
    logits = torch.tensor([0.5, 0.3, 0.2]).log().expand(3, 3)
    tokens, logprobs = sample_tokens(logits, torch.tensor([0.65, 0.66, 0.9]), temperature=0.5)
    assert tokens.tolist() == [0, 1, 2]
    assert logprobs.tolist() == pytest.approx([math.log(p / 0.38) for p in (0.25, 0.09, 0.04)], abs=1e-6)


@settings(deadline=None, max_examples=60)
@given(
    logits=st.lists(st.floats(-80, 80, width=32), min_size=2, max_size=40),
    uniform=st.floats(0, 1, exclude_max=True, width=32),
    temperature=st.floats(0.1, 5),
)
@example(logits=[-62.0, 65.0, 67.0], uniform=0.0, temperature=1.2421875)  # the least that float32 holds is drawn
def test_a_drawn_token_has_the_log_probability_that_is_reported(
    logits: list[float], uniform: float, temperature: float
) -> None:
    row = torch.tensor([logits])
    tokens, logprobs = sample_tokens(row, torch.tensor([uniform]), temperature=temperature)
    tempered = row / temperature
    expected = tempered.log_softmax(-1)[0, tokens[0]]
    assert float(logprobs[0]) == pytest.approx(float(expected), abs=2e-5)
    # Beside the likeliest token: below this the exponential is 0 in float32, and the token is never drawn.
    assert float(tempered[0, tokens[0]] - tempered.max()) > -104.0


@pytest.mark.parametrize("per_row", [False, True])
def test_sampling_a_few_rows_at_a_time_changes_nothing(monkeypatch: pytest.MonkeyPatch, per_row: bool) -> None:
    logits, draws = torch.randn(7, 50, generator=torch.Generator().manual_seed(0)), uniforms(7, 1)[:, 0]
    temperature = torch.linspace(0.5, 2.0, 7)[:, None] if per_row else 0.7
    whole = sample_tokens(logits, draws, temperature=temperature)
    for size in (1, 150):
        monkeypatch.setattr(decoding, "_CHUNK", size)
        for found, expected in zip(sample_tokens(logits, draws, temperature=temperature), whole, strict=True):
            assert torch.equal(found, expected)


def test_logits_that_are_not_finite_show_in_the_log_probability() -> None:
    _, logprobs = sample_tokens(torch.tensor([[0.0, float("nan"), 1.0]]), torch.tensor([0.5]), temperature=1.0)
    assert not logprobs.isfinite().any()


def test_the_likeliest_token_comes_with_its_log_probability_at_temperature_one() -> None:
    tokens, logprobs = argmax_tokens(torch.tensor([0.2, 0.5, 0.3]).log()[None], torch.tensor([0.99]))
    assert tokens.tolist() == [1]
    assert logprobs.tolist() == pytest.approx([math.log(0.5)], abs=1e-6)


COMMON = {
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,  # far from uniform, so that an error in attention shows
}


def llama() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**COMMON))


def mistral_with_a_window_of_six() -> PreTrainedModel:
    return MistralForCausalLM(MistralConfig(**COMMON | {"sliding_window": 6}))


def ready(architecture: object) -> PreTrainedModel:
    assert callable(architecture)
    torch.manual_seed(0)
    model: PreTrainedModel = architecture().eval()
    model.set_attn_implementation(GROUPED_ATTENTION)
    return model


def uniforms(num_sequences: int, num_tokens: int) -> torch.Tensor:
    return torch.rand(num_sequences, num_tokens, generator=torch.Generator().manual_seed(1))


def run(model: PreTrainedModel, num_tokens: int, eos_ids: torch.Tensor, temperature: float = 0.9) -> Decoded:
    choose = partial(sample_tokens, temperature=temperature)
    with torch.inference_mode():
        return decode(model, PROMPTS, uniforms(len(PROMPTS), num_tokens), choose=choose, eos_ids=eos_ids)


@pytest.mark.parametrize("architecture", [llama, mistral_with_a_window_of_six])
def test_log_probabilities_equal_those_of_a_plain_forward_pass(architecture: object) -> None:
    model = ready(architecture)
    decoded = run(model, 80, NO_EOS)  # longer than a buffer's first allotment of 64
    model.set_attn_implementation("sdpa")
    assert decoded.lengths.tolist() == [80] * 4
    assert not decoded.stopped.any()
    for prompt, tokens, logprobs in zip(PROMPTS, decoded.tokens, decoded.logprobs, strict=True):
        whole = torch.cat([torch.tensor(prompt), tokens])[None]
        with torch.no_grad():
            logits = model(whole, use_cache=False).logits[0, len(prompt) - 1 : -1]
        expected = (logits / 0.9).log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
        torch.testing.assert_close(logprobs, expected, atol=1e-4, rtol=0)


def test_dropping_ended_rows_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, eos_ids = ready(llama), torch.arange(0, 40, 7)
    monkeypatch.setattr(decoding, "_COMPACT_AT", 0.0)
    never = run(model, 30, eos_ids)
    monkeypatch.setattr(decoding, "_COMPACT_AT", 1.0)
    always = run(model, 30, eos_ids)
    assert len(set(never.lengths.tolist())) > 2  # rows end at different steps
    assert never.lengths.tolist() == always.lengths.tolist()
    for row, length in enumerate(never.lengths.tolist()):
        assert torch.equal(never.tokens[row, :length], always.tokens[row, :length])
        torch.testing.assert_close(never.logprobs[row, :length], always.logprobs[row, :length], atol=1e-5, rtol=0)


def test_a_row_ends_at_its_first_eos_id_and_only_there() -> None:
    eos_ids = torch.arange(0, 40, 7)
    decoded = run(ready(llama), 30, eos_ids)
    unstopped = run(ready(llama), 30, NO_EOS)
    for row, length in enumerate(decoded.lengths.tolist()):
        is_end = torch.isin(unstopped.tokens[row], eos_ids)
        assert bool(decoded.stopped[row]) == bool(is_end.any())
        assert length == (int(is_end.nonzero()[0]) + 1 if is_end.any() else 30)
        assert torch.equal(decoded.tokens[row, :length], unstopped.tokens[row, :length])


def test_equal_prompts_share_one_prefill() -> None:
    model = ready(llama)
    batch_sizes: list[int] = []
    model.register_forward_pre_hook(
        lambda _, __, inputs: batch_sizes.append(len(inputs["input_ids"])), with_kwargs=True
    )
    run(model, 3, NO_EOS)
    assert batch_sizes == [3, 4, 4]  # three distinct prompts, then four sequences


EOS = torch.arange(0, 40, 5)  # a fifth of the vocabulary: rows end at different places


def plain() -> PreTrainedModel:
    torch.manual_seed(0)
    model = llama().eval()
    model.generation_config = GenerationConfig()
    return model


def run_of_library_decoding(prompts: list[tuple[int, ...]], draws: torch.Tensor, eos_ids: torch.Tensor) -> Decoded:
    choose = partial(sample_tokens, temperature=0.9)
    with torch.inference_mode():
        return decode_by_library(plain(), prompts, draws, choose=choose, eos_ids=eos_ids)


@pytest.mark.parametrize("eos_ids", [NO_EOS, EOS], ids=["no end", "ends"])
def test_it_gives_what_our_own_decoding_gives(eos_ids: torch.Tensor) -> None:
    draws = uniforms(len(PROMPTS), 20)
    theirs = run_of_library_decoding(PROMPTS, draws, eos_ids)
    with torch.inference_mode():
        ours = decode(ready(llama), PROMPTS, draws, choose=partial(sample_tokens, temperature=0.9), eos_ids=eos_ids)
    assert theirs.lengths.tolist() == ours.lengths.tolist()
    assert theirs.stopped.tolist() == ours.stopped.tolist()
    assert (len(set(ours.lengths.tolist())) > 1) == bool(len(eos_ids))
    for row, length in enumerate(ours.lengths.tolist()):
        assert torch.equal(theirs.tokens[row, :length], ours.tokens[row, :length])
        torch.testing.assert_close(theirs.logprobs[row, :length], ours.logprobs[row, :length], atol=2e-5, rtol=0)


def test_a_prefill_holds_only_so_many_tokens_and_one_length(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [(5, 6)] * 3 + [(5, 6, 7)] + [(8, 9)] * 2
    assert list(decoding._parts(prompts)) == [[0, 1, 2, 4, 5], [3]]
    monkeypatch.setattr(decoding, "MAX_PREFILL_TOKENS", 5)
    assert list(decoding._parts(prompts)) == [[0, 1], [2, 4], [5], [3]]
    draws = uniforms(6, 8)
    in_parts = run_of_library_decoding(prompts, draws, NO_EOS)
    monkeypatch.undo()
    assert torch.equal(run_of_library_decoding(prompts, draws, NO_EOS).tokens, in_parts.tokens)


def test_prompts_are_not_copied_for_their_rows_and_leave_with_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "_COMPACT_AT", 1.0)
    seen: list[tuple[int, int]] = []
    model = ready(llama)
    advance = decoding._Batch.advance

    def noting(batch: decoding._Batch, tokens: torch.Tensor) -> torch.Tensor:
        logits = advance(batch, tokens)
        seen.append((len(batch.cache.layers[0].prompt_keys), len(batch.cache.layers[0].keys)))
        return logits

    monkeypatch.setattr(decoding._Batch, "advance", noting)
    prompts = [(5, 6, 7)] * 3 + [(8, 9)] * 3
    eos_ids = torch.arange(0, 40, 5)
    with torch.inference_mode():
        decoded = decode(
            model, prompts, uniforms(6, 40), choose=partial(sample_tokens, temperature=0.9), eos_ids=eos_ids
        )
    assert seen[0][0] == 2  # prompts, for at most 6 rows
    assert seen[0][1] > 2
    assert seen[-1][0] <= seen[-1][1]
    ends = decoded.lengths.view(2, 3).amax(1)
    assert seen[-1][0] == (2 if int(ends[0]) == int(ends[1]) else 1)


@pytest.mark.parametrize("groups", [[3, 1, 2], [1, 1, 1], [6]], ids=str)
def test_how_rows_are_spread_over_prompts_changes_nothing(groups: list[int]) -> None:
    prompts = [(5 + number, *range(20, 21 + 2 * number)) for number, size in enumerate(groups) for _ in range(size)]
    model, draws = ready(llama), uniforms(len(prompts), 20)
    choose = partial(sample_tokens, temperature=0.9)
    with torch.inference_mode():
        together = decode(model, prompts, draws, choose=choose, eos_ids=NO_EOS)
        for row, prompt in enumerate(prompts):
            alone = decode(model, [prompt], draws[row : row + 1], choose=choose, eos_ids=NO_EOS)
            assert torch.equal(together.tokens[row], alone.tokens[0])
            torch.testing.assert_close(together.logprobs[row], alone.logprobs[0], atol=2e-5, rtol=0)


def test_it_decodes_in_bfloat16_too() -> None:
    model = ready(llama)
    choose = partial(sample_tokens, temperature=0.9)
    with torch.inference_mode():
        exact = decode(model, [(5, 6, 7)] * 2 + [(8, 9)], uniforms(3, 5), choose=choose, eos_ids=NO_EOS)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            half = decode(model, [(5, 6, 7)] * 2 + [(8, 9)], uniforms(3, 5), choose=choose, eos_ids=NO_EOS)
    torch.testing.assert_close(half.logprobs[:, 0], exact.logprobs[:, 0], atol=0.1, rtol=0)
    assert half.logprobs.dtype == torch.float32
