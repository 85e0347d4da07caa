"""Packed log-probabilities and gradients of real architectures on the device, against the library's, one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Lfm2Config, LlamaConfig, MistralConfig, Qwen3Config

from rlcore.models.architectures import pack_for
from rlcore.models.logprob_check import check_model
from rlcore.models.policy import completion_logprobs, score_sequences
from tests.gpu import micro

# A hybrid, whose rows cannot be trees, is among them, and a window shorter than the sequences.
MODELS: dict[str, Any] = {
    "llama": micro.make(LlamaConfig, tie_word_embeddings=True),
    "qwen3": micro.make(Qwen3Config, head_dim=32),
    "mistral": micro.make(MistralConfig, sliding_window=12),
    "lfm2": micro.make(Lfm2Config, layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False),
}
SEQUENCES = micro.sequences()
BOUNDS = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}  # nats a token; of gradients, ten times that


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    return MODELS[request.param]


def test_packed_log_probabilities_and_gradients_are_the_librarys(
    model: Any, device: torch.device, dtype: torch.dtype
) -> None:
    exact, gradients = micro.exactly(model, SEQUENCES)
    ours = micro.placed(model, device, dtype)
    for budget in (64, 4096):
        scores = score_sequences(ours, SEQUENCES, tokens_per_microbatch=budget)
        for mine, true in zip(scores, exact, strict=True):
            assert float((mine.double() - true).abs().max()) < BOUNDS[dtype]
    for batch in pack_for(ours, SEQUENCES, tokens_per_microbatch=256):
        completion_logprobs(ours, batch.to(device))[0].sum().backward()
    found = {name: weight.grad for name, weight in ours.named_parameters() if weight.grad is not None}
    assert found.keys() == gradients.keys()
    assert all(each.dtype == torch.float32 for each in found.values())
    whole = [torch.cat([grads[name].flatten().cpu().double() for name in found]) for grads in (found, gradients)]
    assert micro.distance(whole[0], whole[1]) < 10 * BOUNDS[dtype]


def test_the_check_before_a_run_accepts_the_model(model: Any, device: torch.device, dtype: torch.dtype) -> None:
    check_model(micro.placed(model, device, dtype))


def test_many_widths_do_not_exhaust_the_compiler(card: torch.device, dtype: torch.dtype) -> None:
    # Without gradient and with, one row and many, short and long: each a kind that FlexAttention is compiled for.
    ours = micro.placed(MODELS["llama"], card, dtype)
    for longest in (4, 100, 200, 300, 480):
        asked = micro.sequences(2, 3, longest=longest)
        exact, _ = micro.exactly(MODELS["llama"], asked)
        for mine, true in zip(score_sequences(ours, asked, tokens_per_microbatch=4096), exact, strict=True):
            assert float((mine.double() - true).abs().max()) < BOUNDS[dtype]
        for batch in pack_for(ours, asked, tokens_per_microbatch=600):
            completion_logprobs(ours, batch.to(card))[0].sum().backward()
