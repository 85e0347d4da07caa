"""Weights by vLLM's weight-transfer API, on its own server: every way that a machine without a GPU has.

`make test-engine` runs it; the interpreter of the engine's environment is in ENGINE_PYTHON.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from transformers import PreTrainedModel

from rlcore.config import GpuConfig, TransferKind
from rlcore.errors import SamplingError, StaleSamplerError
from rlcore.models.loading import load_policy
from rlcore.sampling.base import SamplingParams, take_metrics
from rlcore.sampling.native import NativeSampler
from rlcore.sampling.replicas import ReplicatedSampler, open_servers
from rlcore.sampling.vllm.server import VllmSampler
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import Prompt
from tests.integration import vllm_runs
from tests.integration.vllm_runs import (
    PARAMS,
    TOLERANCE,
    killed_after,
    lose,
    move,
    prove,
    rollouts_of,
    say,
    sync,
    worst_difference,
)

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


def test_one_server_of_two_parts_is_sent_the_whole_by_each_way(
    checkpoint: Path, tokenizer: ChatTokenizer, trained: PreTrainedModel, prompts: list[Prompt], transfer: TransferKind
) -> None:
    spec = vllm_runs.make_spec(checkpoint, transfer=transfer)
    config = replace(spec.config, gpus=GpuConfig(tensor_parallel=2))
    with open_servers([replace(spec, config=config, max_concurrent=4)], tokenizer, say) as engine:
        for version in (1, 2):
            engine.load_weights(move(trained, version, 0.03), policy_version=version)
            native = NativeSampler(trained, tokenizer)
            assert worst_difference(engine, native, prompts, seed=version) <= TOLERANCE


@pytest.fixture(scope="module")
def engines(checkpoint: Path, tokenizer: ChatTokenizer, transfer: TransferKind) -> Iterator[ReplicatedSampler]:
    exchange = Path(tempfile.mkdtemp())
    specs = [replace(vllm_runs.make_spec(checkpoint, transfer=transfer), weight_dir=exchange) for _ in range(2)]
    with open_servers(specs, tokenizer, say) as sampler:
        assert isinstance(sampler, ReplicatedSampler)
        yield sampler
        processes = psutil.Process().children(recursive=True)
    assert not [process for process in processes if process.is_running()], "an engine was left behind"


def members(engines: ReplicatedSampler) -> list[VllmSampler]:
    return [member for member in engines.members if isinstance(member, VllmSampler)]


def sync_all(engines: ReplicatedSampler, trained: PreTrainedModel, prompts: list[Prompt]) -> None:
    """Weights moved, sent, and proved on each server as a run does it."""
    version = engines.policy_version + 1
    engines.load_weights(move(trained, version, 0.03), policy_version=version)
    for member in engines.members:
        prove(member, trained, prompts)


def test_the_draws_are_those_of_one_server(engines: ReplicatedSampler, prompts: list[Prompt]) -> None:
    both = [r.completion_ids for r in rollouts_of(engines.sample(prompts, PARAMS, seed=1))]
    alone = [r.completion_ids for r in rollouts_of(engines.members[1].sample(prompts, PARAMS, seed=1))]
    assert both == alone
    figures = take_metrics(engines)
    say(f"\n{figures}")
    assert figures["engine/tokens_per_second"] > 0.0


def test_a_sync_reaches_both(
    engines: ReplicatedSampler, trained: PreTrainedModel, tokenizer: ChatTokenizer, prompts: list[Prompt]
) -> None:
    for _ in range(2):
        sync_all(engines, trained, prompts)
    assert [member.policy_version for member in engines.members] == [2, 2]
    (one, other) = members(engines)
    assert len(list(one._spec.weight_dir.iterdir())) == 1  # one file for both
    assert one.served is other.served
    assert worst_difference(engines, NativeSampler(trained, tokenizer), prompts, seed=2) <= TOLERANCE


def test_a_sync_that_one_of_them_lost_is_seen(
    engines: ReplicatedSampler, trained: PreTrainedModel, prompts: list[Prompt]
) -> None:
    lose(members(engines)[1], "stale")
    with pytest.raises(StaleSamplerError):
        sync_all(engines, trained, prompts)
    lose(members(engines)[1], "")
    sync_all(engines, trained, prompts)


def test_one_that_is_killed_comes_back_and_every_prompt_is_sampled_once(
    engines: ReplicatedSampler, trained: PreTrainedModel, tokenizer: ChatTokenizer, prompts: list[Prompt]
) -> None:
    params = SamplingParams(temperature=1.0, max_new_tokens=160, num_samples=8)
    expected = [r.completion_ids for r in rollouts_of(engines.sample(prompts, params, seed=3))]
    with killed_after(members(engines)[1], 0.2):
        groups = engines.sample(prompts, params, seed=3)
    rollouts = rollouts_of(groups)
    assert [r.prompt.prompt_id for r in rollouts] == [p.prompt_id for p in prompts for _ in range(8)]
    assert [r.completion_ids for r in rollouts] == expected
    assert worst_difference(engines, NativeSampler(trained, tokenizer), prompts, seed=4) <= TOLERANCE
    sync_all(engines, trained, prompts)  # a group has to be formed anew
    assert worst_difference(engines, NativeSampler(trained, tokenizer), prompts, seed=5) <= TOLERANCE
