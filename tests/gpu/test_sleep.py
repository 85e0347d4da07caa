"""One GPU for vLLM and the learner: the server, of the environment ENGINE_PYTHON, sleeps during updates."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlcore.hardware.out_of_memory import empty_cache
from rlcore.models.loading import load_policy
from rlcore.sampling.base import sleep_engine
from rlcore.sampling.native import NativeSampler
from rlcore.text.tokenization import ChatTokenizer

TOLERANCE = 0.01  # nats in float32, whose products may be in TF32


def free(card: torch.device) -> int:
    empty_cache()
    return torch.cuda.mem_get_info(card)[0]


def test_a_server_that_slept_gives_its_memory_and_serves_the_weights_of_the_update(
    card: torch.device, tmp_path: Path
) -> None:
    from tests.integration import vllm_runs

    if not vllm_runs.PYTHON:
        pytest.skip("ENGINE_PYTHON names no interpreter with vLLM")
    checkpoint = vllm_runs.make_checkpoint(tmp_path / "model")
    tokenizer = ChatTokenizer.load(checkpoint)
    prompts = vllm_runs.make_prompts(tokenizer)
    model = load_policy(checkpoint, device=card, dtype=torch.float32)
    on_card = {"devices": (card.index or 0,), "gpu_memory_utilization": 0.3, "prefill_in_parts": True}
    with vllm_runs.serving(checkpoint, tokenizer, transfer="shared_memory", sleeps=True, **on_card) as engine:
        for version in (1, 2, 3):
            assert vllm_runs.worst_difference(engine, NativeSampler(model, tokenizer), prompts, version) <= TOLERANCE
            awake = free(card)
            sleep_engine(engine)
            assert free(card) > awake + 2**27  # half of the cache of 0.25 GiB, at least
            state = vllm_runs.move(model, version, 0.03)
            engine.load_weights(state, policy_version=version)
            assert engine.differing_parts(state) == []
        figures = vllm_runs.prove(engine, model, prompts)
        assert figures["sync/logprob_max_diff"] <= TOLERANCE
        assert engine.policy_version == 3
