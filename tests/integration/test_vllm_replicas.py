"""Two real vLLM servers behind one sampler: what is sampled is what one would have made, also when one is killed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from transformers import PreTrainedModel

from rlcore.canaries import SyncProbe, sync_canary
from rlcore.errors import CanaryError
from rlcore.sampling.base import SamplingParams
from rlcore.sampling.native import NativeSampler
from rlcore.sampling.replicas import ReplicatedSampler, open_servers, take_metrics
from rlcore.sampling.vllm_server import VllmSampler
from rlcore.tokenization import ChatTokenizer
from rlcore.types import Prompt
from tests.integration import vllm_runs
from tests.integration.vllm_runs import PARAMS, TOLERANCE, killed_after, lose, move, rollouts_of, say, worst_difference

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def engines(checkpoint: Path, tokenizer: ChatTokenizer) -> Iterator[ReplicatedSampler]:
    specs = [vllm_runs.make_spec(checkpoint) for _ in range(2)]
    with open_servers(specs, tokenizer, say) as sampler:
        assert isinstance(sampler, ReplicatedSampler)
        yield sampler
        processes = psutil.Process().children(recursive=True)
    assert not [process for process in processes if process.is_running()], "an engine was left behind"


def members(engines: ReplicatedSampler) -> list[VllmSampler]:
    return [member for member in engines.members if isinstance(member, VllmSampler)]


def sync_all(
    engines: ReplicatedSampler, trained: PreTrainedModel, tokenizer: ChatTokenizer, prompts: list[Prompt]
) -> None:
    """Weights moved, sent, and proved on each server as a run does it."""
    probe = SyncProbe(prompt_ids=prompts[0].token_ids, completion_ids=prompts[3].token_ids[:16])
    before = [each.logprobs(probe.prompt_ids, probe.completion_ids, temperature=1.0) for each in engines.members]
    version = engines.policy_version + 1
    engines.load_weights(move(trained, version, 0.03), policy_version=version)
    native = NativeSampler(trained, tokenizer)
    for member, earlier in zip(engines.members, before, strict=True):
        sync_canary(
            member,
            lambda probe: native.logprobs(probe.prompt_ids, probe.completion_ids, temperature=1.0),
            [probe],
            policy_version=version,
            before=[earlier],
            dtype=getattr(torch, vllm_runs.DTYPE),
        )


def test_the_draws_are_those_of_one_server(engines: ReplicatedSampler, prompts: list[Prompt]) -> None:
    both = [r.completion_ids for r in rollouts_of(engines.sample(prompts, PARAMS, seed=1))]
    alone = [r.completion_ids for r in rollouts_of(engines.members[1].sample(prompts, PARAMS, seed=1))]
    assert both == alone
    figures = take_metrics(engines)
    say(f"\n{figures}")
    assert figures["engine/running"] > 0.0


def test_a_sync_reaches_both(
    engines: ReplicatedSampler, trained: PreTrainedModel, tokenizer: ChatTokenizer, prompts: list[Prompt]
) -> None:
    for _ in range(2):
        sync_all(engines, trained, tokenizer, prompts)
    assert [member.policy_version for member in engines.members] == [2, 2]
    assert worst_difference(engines, NativeSampler(trained, tokenizer), prompts, seed=2) <= TOLERANCE


def test_a_sync_that_one_of_them_lost_is_seen(
    engines: ReplicatedSampler, trained: PreTrainedModel, tokenizer: ChatTokenizer, prompts: list[Prompt]
) -> None:
    lose(members(engines)[1], "stale")
    with pytest.raises(CanaryError):
        sync_all(engines, trained, tokenizer, prompts)
    lose(members(engines)[1], "")
    sync_all(engines, trained, tokenizer, prompts)


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
