"""Weights by vLLM's weight-transfer API, on its own server: every way that a machine without a GPU has.

`make test-engine` runs it; the interpreter of the engine's environment is in ENGINE_PYTHON.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from rlcore.config import TransferKind
from rlcore.errors import SamplingError, StaleSamplerError
from rlcore.models.loading import load_policy
from rlcore.sampling.native import NativeSampler
from rlcore.sampling.vllm.server import VllmSampler
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import Prompt
from tests.integration import vllm_runs
from tests.integration.vllm_runs import TOLERANCE, lose, rollouts_of, say, sync, worst_difference

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def trained(checkpoint: Path, transfer: TransferKind) -> PreTrainedModel:
    """The learner's model, a fresh one for each way; the tests move its weights."""
    return load_policy(checkpoint, device=torch.device("cpu"), dtype=torch.float32)


@pytest.fixture(scope="module")
def engine(checkpoint: Path, tokenizer: ChatTokenizer, transfer: TransferKind) -> Iterator[VllmSampler]:
    with vllm_runs.serving(checkpoint, tokenizer, transfer=transfer) as sampler:
        yield sampler


def test_three_syncs_leave_no_difference_on_a_tied_model(
    engine: VllmSampler,
    trained: PreTrainedModel,
    tokenizer: ChatTokenizer,
    prompts: list[Prompt],
    transfer: TransferKind,
) -> None:
    for version in (1, 2, 3):
        started = time.perf_counter()
        engine.load_weights(vllm_runs.move(trained, version, 0.03), policy_version=version)
        say(f"\n{transfer}: weights loaded in {time.perf_counter() - started:.3f} s")
    assert sync(engine, trained, prompts) <= TOLERANCE
    assert worst_difference(engine, NativeSampler(trained, tokenizer), prompts, seed=2) <= TOLERANCE
    assert {r.policy_version for r in rollouts_of(engine.sample(prompts, vllm_runs.PARAMS, seed=2))} == {4}


@pytest.mark.parametrize("size", [1e-7, 0.03])
@pytest.mark.parametrize("lost", ["stale", "head", "model.layers.1.mlp.down_proj.weight"])
def test_weights_that_are_lost_on_the_way_are_seen_at_once(
    lost: str, size: float, engine: VllmSampler, trained: PreTrainedModel, prompts: list[Prompt]
) -> None:
    lose(engine, lost)
    with pytest.raises(StaleSamplerError, match="are not the learner's in"):
        sync(engine, trained, prompts, size)
    lose(engine, "")
    assert sync(engine, trained, prompts) <= TOLERANCE


def test_an_update_that_breaks_off_in_the_middle_leaves_the_old_weights_on_a_fresh_server(
    engine: VllmSampler, trained: PreTrainedModel, tokenizer: ChatTokenizer, prompts: list[Prompt]
) -> None:
    version, first = engine.policy_version, engine._process
    probe = (prompts[0].token_ids, prompts[1].token_ids[:8])
    before = engine.logprobs(*probe, temperature=1.0)
    lose(engine, "refuse")
    with pytest.raises(SamplingError, match="could not be sent to the engine"):
        engine.load_weights(vllm_runs.move(trained, 99, 0.03), policy_version=version + 1)
    assert engine._process is not first
    assert engine.policy_version == version
    assert engine.logprobs(*probe, temperature=1.0) == pytest.approx(before, abs=1e-5)
    assert sync(engine, trained, prompts) <= TOLERANCE


def test_vllms_senders_between_gpus_announce_what_they_send_and_reach_the_server_by_its_routes(
    checkpoint: Path,
) -> None:
    script = Path(__file__).with_name("builtin_senders.py")
    variables = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    line = [vllm_runs.PYTHON, str(script), str(checkpoint)]
    output = subprocess.run(line, env=variables, stdout=subprocess.PIPE, text=True, check=True).stdout
    found = json.loads(output.partition("FOUND ")[2])
    update = ["/start_weight_update", "/update_weights", "/finish_weight_update"]
    assert found["routes"] == ["/get_world_size", *update]  # asked for NCCL's meeting; nothing for IPC
    assert found["world_size"] == 4  # three workers and the trainer
    assert found["sent"] == found["names"] != []
