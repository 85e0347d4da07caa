"""Decoding by the library: the tokens are ours to draw, and rows of other prompts have no say in them."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

from rlcore.sampling import library_decoding
from rlcore.sampling.decoding import Decoded, argmax_tokens, decode, sample_tokens
from rlcore.sampling.library_decoding import decode_by_library
from tests.rlcore.sampling.test_decoding import NO_EOS, PROMPTS, llama, ready, uniforms

EOS = torch.arange(0, 40, 5)  # a fifth of the vocabulary: rows end at different places


def plain() -> PreTrainedModel:
    torch.manual_seed(0)
    model = llama().eval()
    model.generation_config = GenerationConfig()
    return model


def run(prompts: list[tuple[int, ...]], draws: torch.Tensor, eos_ids: torch.Tensor) -> Decoded:
    choose = partial(sample_tokens, temperature=0.9)
    with torch.inference_mode():
        return decode_by_library(plain(), prompts, draws, choose=choose, eos_ids=eos_ids)


@pytest.mark.parametrize("eos_ids", [NO_EOS, EOS], ids=["no end", "ends"])
def test_it_gives_what_our_own_decoding_gives(eos_ids: torch.Tensor) -> None:
    draws = uniforms(len(PROMPTS), 20)
    theirs = run(PROMPTS, draws, eos_ids)
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
    assert list(library_decoding._parts(prompts)) == [[0, 1, 2, 4, 5], [3]]
    monkeypatch.setattr(library_decoding, "MAX_PREFILL_TOKENS", 5)
    assert list(library_decoding._parts(prompts)) == [[0, 1], [2, 4], [5], [3]]
    draws = uniforms(6, 8)
    in_parts = run(prompts, draws, NO_EOS)
    monkeypatch.undo()
    assert torch.equal(run(prompts, draws, NO_EOS).tokens, in_parts.tokens)


def test_a_filter_of_the_models_own_configuration_would_show() -> None:
    """The draws are of the whole distribution: the log-probability is that of a plain forward pass."""
    model = plain()
    with torch.inference_mode():
        decoded = decode_by_library(model, [(5, 6, 7)], uniforms(1, 6), choose=argmax_tokens, eos_ids=NO_EOS)
        whole = torch.cat([torch.tensor([5, 6, 7]), decoded.tokens[0]])[None]
        exact = model(whole).logits[0, 2:-1].log_softmax(-1).gather(-1, decoded.tokens[0][:, None])[:, 0]
    torch.testing.assert_close(decoded.logprobs[0], exact, atol=2e-5, rtol=0)
