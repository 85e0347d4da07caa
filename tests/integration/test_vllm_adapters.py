"""A policy that is a LoRA adapter, on a real vLLM server: the adapter alone is sent, and swapped while it runs.

`make test-engine` runs it; the interpreter of the engine's environment is in ENGINE_PYTHON.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rlcore.config import LoraConfig
from rlcore.errors import CanaryError, SamplingError, StaleSamplerError
from rlcore.models.loading import load_policy
from rlcore.models.lora import AdaptedModel, MergedState, add_lora
from rlcore.models.policy import score_sequences
from rlcore.sampling.vllm import server_sync as syncing
from rlcore.sampling.vllm.server import VllmSampler
from rlcore.sampling.vllm.server_sync import publish
from rlcore.sampling.vllm.weights import Weights
from rlcore.text.packing import TokenSequence
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import Prompt
from tests.integration import vllm_runs
from tests.integration.vllm_runs import PARAMS, TOLERANCE, prove, rollouts_of, say

pytestmark = pytest.mark.engine

CPU = torch.device("cpu")
RANK = 4


@pytest.fixture(scope="module")
def policy(checkpoint: Path) -> AdaptedModel:
    base = load_policy(checkpoint, device=CPU, dtype=torch.float32)
    return add_lora(base, LoraConfig(rank=RANK, alpha=16), "policy", seed=0)


@pytest.fixture(scope="module")
def engine(checkpoint: Path, tokenizer: ChatTokenizer) -> Iterator[VllmSampler]:
    with vllm_runs.serving(checkpoint, tokenizer, lora_rank=RANK) as sampler:
        yield sampler


def scored(policy: AdaptedModel, prompt_ids: tuple[int, ...], completion_ids: tuple[int, ...]) -> list[float]:
    """The log-probabilities as the trainer computes them, through peft's layers, at temperature 1."""
    sequence = TokenSequence(prompt_ids=prompt_ids, completion_ids=completion_ids)
    values: list[float] = score_sequences(policy, [sequence], tokens_per_microbatch=512)[0].tolist()
    return values


def worst_difference(engine: VllmSampler, policy: AdaptedModel, prompts: list[Prompt], *, seed: int) -> float:
    differences = []
    for rollout in rollouts_of(engine.sample(prompts, PARAMS, seed=seed)):
        pair = (rollout.prompt.token_ids, rollout.completion_ids)
        engines = engine.logprobs(*pair, temperature=1.0)
        differences += [abs(a - b) for a, b in zip(engines, scored(policy, *pair), strict=True)]
    say(f"\nadapter: {len(differences)} tokens, max {max(differences):.2e}")
    return max(differences)


def swap(engine: VllmSampler, policy: AdaptedModel, prompts: list[Prompt], *, seed: int, size: float = 0.05) -> float:
    """The adapter moved, sent and proved; returns the largest difference of a log-probability."""
    draws = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += size * torch.randn(parameter.shape, generator=draws)
    version = engine.policy_version + 1
    started = time.perf_counter()
    engine.load_weights(MergedState(policy), policy_version=version)
    say(f"\nadapter swapped in {time.perf_counter() - started:.3f} s")
    return prove(engine, policy, prompts)["sync/logprob_max_diff"]


def test_an_adapter_that_has_learned_nothing_is_the_base(
    engine: VllmSampler, policy: AdaptedModel, prompts: list[Prompt]
) -> None:
    assert worst_difference(engine, policy, prompts, seed=0) <= TOLERANCE


def test_after_two_swaps_the_engine_is_the_policy_and_only_the_adapter_went_there(
    engine: VllmSampler, policy: AdaptedModel, prompts: list[Prompt]
) -> None:
    for seed in (1, 2):
        assert swap(engine, policy, prompts, seed=seed) <= TOLERANCE
        assert worst_difference(engine, policy, prompts, seed=seed) <= TOLERANCE
    assert {r.policy_version for r in rollouts_of(engine.sample(prompts, PARAMS, seed=2))} == {2}
    (served,) = engine._spec.weight_dir.iterdir()
    size = sum(path.stat().st_size for path in served.iterdir())
    assert size < 0.5 * sum(path.stat().st_size for path in engine._spec.model.glob("*.safetensors"))


def test_an_adapter_that_the_engine_refuses_leaves_the_one_before_on_a_fresh_server(
    engine: VllmSampler, policy: AdaptedModel, prompts: list[Prompt]
) -> None:
    version, first = engine.policy_version, engine._process
    larger = add_lora(policy, LoraConfig(rank=64, alpha=16), "larger", seed=0)  # the server has room for rank 8
    with pytest.raises(SamplingError, match="could not be sent to the engine"):
        engine.load_weights(MergedState(larger), policy_version=version + 1)
    assert engine._process is not first
    assert engine.policy_version == version
    assert worst_difference(engine, policy, prompts, seed=3) <= TOLERANCE
    assert swap(engine, policy, prompts, seed=4) <= TOLERANCE


def test_an_adapter_that_is_not_applied_is_seen_however_little_it_has_learned(
    engine: VllmSampler,
    policy: AdaptedModel,
    prompts: list[Prompt],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """The server is given the adapter of before; a step of 1e-7 shows in no log-probability."""
    stale = Weights(path=shutil.copytree(engine.served.path, tmp_path / "stale"), is_adapter=True)
    with monkeypatch.context() as patched:
        patched.setattr(syncing, "publish", lambda group, _, version, send: publish(group, stale, version, send))
        with pytest.raises(StaleSamplerError, match="adapter of layer 0, adapter of layer 1"):
            swap(engine, policy, prompts, seed=3, size=1e-7)
    assert swap(engine, policy, prompts, seed=4) <= TOLERANCE


def test_a_policy_whose_adapter_is_not_asked_for_is_seen(
    engine: VllmSampler, policy: AdaptedModel, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right weights in the server, and completions of its base."""
    with monkeypatch.context() as patched:
        patched.setattr(type(engine), "_adapter", lambda _: {})
        with pytest.raises((CanaryError, StaleSamplerError)):
            swap(engine, policy, prompts, seed=5)
    assert swap(engine, policy, prompts, seed=6) <= TOLERANCE
