"""Weights on vLLM's own servers: one of two parts, and several.

`make test-engine` runs it; the interpreter of the engine's environment is in ENGINE_PYTHON.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from transformers import PreTrainedModel

from rlcore.config import GpuConfig
from rlcore.errors import StaleSamplerError
from rlcore.sampling.base import SamplingParams, take_metrics
from rlcore.sampling.native import NativeSampler
from rlcore.sampling.replicas import ReplicatedSampler, open_servers
from rlcore.sampling.vllm.server import VllmSampler, open_vllm
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
    worst_difference,
)

pytestmark = pytest.mark.engine


def test_one_server_of_two_parts_is_sent_the_whole(
    checkpoint: Path, tokenizer: ChatTokenizer, trained: PreTrainedModel, prompts: list[Prompt]
) -> None:
    spec = vllm_runs.make_spec(checkpoint)
    config = replace(spec.config, gpus=GpuConfig(tensor_parallel=2))
    with open_vllm(replace(spec, config=config, max_concurrent=4), tokenizer, say) as engine:
        for version in (1, 2):
            engine.load_weights(move(trained, version, 0.03), policy_version=version)
            native = NativeSampler(trained, tokenizer)
            assert worst_difference(engine, native, prompts, seed=version) <= TOLERANCE


@pytest.fixture(scope="module")
def engines(checkpoint: Path, tokenizer: ChatTokenizer) -> Iterator[ReplicatedSampler]:
    exchange = Path(tempfile.mkdtemp())
    specs = [replace(vllm_runs.make_spec(checkpoint), weight_dir=exchange) for _ in range(2)]
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
