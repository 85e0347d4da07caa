"""A real vLLM server against the trainer: log-probabilities, weight sync and its faults, death in the middle.

`make test-engine` runs it; the interpreter of the engine's environment is in ENGINE_PYTHON.
"""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from rlcore.config import LoraConfig
from rlcore.errors import CanaryError, SamplingError, StaleSamplerError
from rlcore.metrics import check_names
from rlcore.models.loading import load_policy
from rlcore.models.lora import AdaptedModel, MergedState, add_lora
from rlcore.models.policy import score_sequences
from rlcore.sampling.base import SamplingParams, sleep_engine
from rlcore.sampling.native import NativeSampler
from rlcore.sampling.vllm import server_sync as syncing
from rlcore.sampling.vllm.client import call
from rlcore.sampling.vllm.server import VllmSampler
from rlcore.sampling.vllm.server_sync import publish
from rlcore.sampling.vllm.weights import Weights
from rlcore.text.packing import TokenSequence
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import FailedRollout, Message, Prompt, Rollout
from tests.integration import vllm_runs
from tests.integration.vllm_runs import (
    PARAMS,
    TOLERANCE,
    killed_after,
    lose,
    prove,
    rollouts_of,
    say,
    sync,
    worst_difference,
)

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def engine(checkpoint: Path, tokenizer: ChatTokenizer) -> Iterator[VllmSampler]:
    with vllm_runs.serving(checkpoint, tokenizer) as sampler:
        yield sampler


def test_sampled_tokens_have_the_trainers_log_probabilities_and_end_with_eos_or_the_limit(
    engine: VllmSampler, native: NativeSampler, prompts: list[Prompt], tokenizer: ChatTokenizer
) -> None:
    assert worst_difference(engine, native, prompts, seed=1) <= TOLERANCE
    for rollout in rollouts_of(engine.sample(prompts, PARAMS, seed=1)):
        assert rollout.policy_version == 0
        assert rollout.text == tokenizer.decode(rollout.completion_ids)
        assert (rollout.completion_ids[-1] in tokenizer.eos_ids) == (rollout.finish_reason == "stop")
        for temperature in (1.0, 0.8):
            expected = native.logprobs(rollout.prompt.token_ids, rollout.completion_ids, temperature=temperature)
            probed = engine.logprobs(rollout.prompt.token_ids, rollout.completion_ids, temperature=temperature)
            assert probed == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize(
    "path", ["/collective_rpc", "/sleep?level=2", "/wake_up", "/inference/v1/generate", "/v1/completions"]
)
def test_who_does_not_know_the_token_reaches_no_route(engine: VllmSampler, path: str) -> None:
    for token in ("", "another"):
        assert call(engine.control.address._replace(token=token), path, {}, seconds=30.0)[0] == 401
        assert call(engine.control.address._replace(token=token), "/health", None, seconds=30.0)[0] == 401


def test_the_likeliest_completion_is_the_built_in_engines(
    engine: VllmSampler, native: NativeSampler, prompts: list[Prompt]
) -> None:
    params = SamplingParams(temperature=1.0, max_new_tokens=16, num_samples=1, greedy=True)
    ours, theirs = (rollouts_of(sampler.sample(prompts, params, seed=0)) for sampler in (native, engine))
    assert [r.completion_ids for r in theirs] == [r.completion_ids for r in ours]
    for one, other in zip(ours, theirs, strict=True):
        assert other.sampler_logprobs == pytest.approx(one.sampler_logprobs, abs=TOLERANCE)


def test_the_draws_of_a_completion_do_not_depend_on_the_batch(engine: VllmSampler, prompts: list[Prompt]) -> None:
    together = engine.sample(prompts, PARAMS, seed=7)
    alone = [engine.sample([prompt], PARAMS, seed=7, places=[n])[0] for n, prompt in enumerate(prompts)]
    tokens = [[r.completion_ids for r in rollouts_of(groups)] for groups in (together, alone)]
    assert tokens[0] == tokens[1]
    assert len(set(tokens[0])) == len(tokens[0])  # no two samples of a prompt share their draws
    assert [r.completion_ids for r in rollouts_of(engine.sample(prompts, PARAMS, seed=8))] != tokens[0]


def test_a_prompt_that_is_too_long_fails_alone(engine: VllmSampler, prompts: list[Prompt]) -> None:
    long = Prompt(prompt_id="long", messages=(), token_ids=(5,) * 250, reference="", task="test")
    groups = engine.sample([prompts[0], long], PARAMS, seed=0)
    assert all(isinstance(item, Rollout) for item in groups[0])
    assert all(isinstance(item, FailedRollout) for item in groups[1])


def test_more_prompt_tokens_than_one_step_takes_are_sampled_from_too(
    engine: VllmSampler, tokenizer: ChatTokenizer
) -> None:
    """16 prompts of some 200 tokens at once, where a step takes 2,048: none may be prefilled in parts."""
    turns = [(Message(role="user", content=f"{number}+" + "1+" * 90 + "2"),) for number in range(16)]
    prompts = [
        Prompt(prompt_id=str(n), messages=each, token_ids=tokenizer.render_prompt(each), reference="", task="test")
        for n, each in enumerate(turns)
    ]
    assert sum(len(prompt.token_ids) for prompt in prompts) > 2500
    groups = engine.sample(prompts, SamplingParams(temperature=0.8, max_new_tokens=4, num_samples=1), seed=5)
    assert len(rollouts_of(groups)) == 16


def test_the_server_says_how_busy_it_was(engine: VllmSampler, prompts: list[Prompt]) -> None:
    engine.take_metrics()
    params = SamplingParams(temperature=1.0, max_new_tokens=160, num_samples=8)
    rollouts = rollouts_of(engine.sample(prompts, params, seed=5))
    figures = engine.take_metrics()
    check_names(figures)
    say(f"\n{figures}")
    assert 1.0 <= figures["engine/running"] <= 16.0  # the bound of requests under way
    assert 0.0 < figures["engine/kv_cache_usage"] <= 1.0
    assert figures["engine/preemptions"] == figures["engine/retries"] == 0.0
    assert 0.0 < figures["engine/tokens_per_second"] < 10 * sum(len(r.completion_ids) for r in rollouts)
    assert engine.take_metrics() == {"engine/retries": 0.0}


def test_a_server_that_slept_serves_the_weights_of_the_update(
    engine: VllmSampler, trained: PreTrainedModel, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU vLLM keeps its memory and refuses --enable-sleep-mode; its routes and its pauses are those of a GPU."""
    monkeypatch.setattr(engine, "_spec", dataclasses.replace(engine._spec, sleeps=True))
    for sleeps in (True, False):
        if sleeps:
            sleep_engine(engine)
        else:
            assert sync(engine, trained, prompts) <= TOLERANCE
        address = engine.control.address
        assert call(address, "/is_sleeping", None, seconds=30.0) == (200, {"is_sleeping": sleeps})


def test_five_syncs_leave_no_difference(
    engine: VllmSampler, trained: PreTrainedModel, tokenizer: ChatTokenizer, prompts: list[Prompt]
) -> None:
    last = engine.policy_version + 5
    for _ in range(5):
        started = time.perf_counter()
        assert sync(engine, trained, prompts) <= TOLERANCE
        say(f"\nsync with its canary: {time.perf_counter() - started:.2f} s")
    assert engine.policy_version == last
    assert worst_difference(engine, NativeSampler(trained, tokenizer), prompts, seed=2) <= TOLERANCE
    assert {r.policy_version for r in rollouts_of(engine.sample(prompts, PARAMS, seed=2))} == {last}


@pytest.mark.parametrize("size", [1e-7, 0.03])
@pytest.mark.parametrize(
    ("lost", "parts"),
    [
        ("stale", "embedding, head, layer 0, layer 1"),
        ("head", "head"),
        ("model.layers.1.mlp.down_proj.weight", "layer 1"),
        ("model.layers.0.self_attn.k_proj.weight", "layer 0"),
        ("model.norm.weight", "vectors of rest"),
    ],
)
def test_weights_that_are_lost_on_the_way_are_seen_at_once_and_named(
    lost: str, parts: str, size: float, engine: VllmSampler, trained: PreTrainedModel, prompts: list[Prompt]
) -> None:
    """However small the step: 1e-7 moves a log-probability by less than rounding does, and shows in the weights."""
    lose(engine, lost)
    with pytest.raises(StaleSamplerError, match=parts):
        sync(engine, trained, prompts, size)
    lose(engine, "")
    assert sync(engine, trained, prompts) <= TOLERANCE


def test_weights_that_do_not_fit_are_refused_before_they_are_sent(
    engine: VllmSampler, trained: PreTrainedModel, prompts: list[Prompt]
) -> None:
    version = engine.policy_version
    probe = (prompts[0].token_ids, prompts[1].token_ids[:8])
    before = engine.logprobs(*probe, temperature=1.0)
    state = dict(trained.state_dict())
    del state["model.norm.weight"]
    with pytest.raises(SamplingError, match=r"model\.norm\.weight is missing"):
        engine.load_weights(state, policy_version=version + 1)
    untied = {**trained.state_dict(), "lm_head.weight": torch.zeros_like(trained.state_dict()["lm_head.weight"])}
    with pytest.raises(SamplingError, match=r"lm_head\.weight is unknown, or tied"):
        engine.load_weights(untied, policy_version=version + 1)
    assert engine.policy_version == version
    assert engine.logprobs(*probe, temperature=1.0) == before


def test_an_engine_killed_while_it_samples_comes_back_and_every_prompt_is_sampled_once(
    engine: VllmSampler, trained: PreTrainedModel, tokenizer: ChatTokenizer, prompts: list[Prompt]
) -> None:
    params = SamplingParams(temperature=1.0, max_new_tokens=160, num_samples=8)
    version = engine.policy_version
    expected = [r.completion_ids for r in rollouts_of(engine.sample(prompts, params, seed=3))]
    with killed_after(engine, 0.3):
        groups = engine.sample(prompts, params, seed=3)
    assert [len(group) for group in groups] == [8] * len(prompts)
    rollouts = rollouts_of(groups)
    assert [r.prompt.prompt_id for r in rollouts] == [p.prompt_id for p in prompts for _ in range(8)]
    assert [r.completion_ids for r in rollouts] == expected
    assert {r.policy_version for r in rollouts} == {version}
    assert worst_difference(engine, NativeSampler(trained, tokenizer), prompts, seed=4) <= TOLERANCE


CPU = torch.device("cpu")
RANK = 4


@pytest.fixture(scope="module")
def adapted(checkpoint: Path) -> AdaptedModel:
    base = load_policy(checkpoint, device=CPU, dtype=torch.float32)
    return add_lora(base, LoraConfig(rank=RANK, alpha=16), "policy", seed=0)


@pytest.fixture(scope="module")
def adapter_engine(checkpoint: Path, tokenizer: ChatTokenizer) -> Iterator[VllmSampler]:
    with vllm_runs.serving(checkpoint, tokenizer, lora_rank=RANK) as sampler:
        yield sampler


def scored(adapted: AdaptedModel, prompt_ids: tuple[int, ...], completion_ids: tuple[int, ...]) -> list[float]:
    """The log-probabilities as the trainer computes them, through peft's layers, at temperature 1."""
    sequence = TokenSequence(prompt_ids=prompt_ids, completion_ids=completion_ids)
    values: list[float] = score_sequences(adapted, [sequence], tokens_per_microbatch=512)[0].tolist()
    return values


def policy_difference(adapter_engine: VllmSampler, adapted: AdaptedModel, prompts: list[Prompt], *, seed: int) -> float:
    differences = []
    for rollout in rollouts_of(adapter_engine.sample(prompts, PARAMS, seed=seed)):
        pair = (rollout.prompt.token_ids, rollout.completion_ids)
        engines = adapter_engine.logprobs(*pair, temperature=1.0)
        differences += [abs(a - b) for a, b in zip(engines, scored(adapted, *pair), strict=True)]
    say(f"\nadapter: {len(differences)} tokens, max {max(differences):.2e}")
    return max(differences)


def swap(
    adapter_engine: VllmSampler, adapted: AdaptedModel, prompts: list[Prompt], *, seed: int, size: float = 0.05
) -> float:
    """The adapter moved, sent and proved; returns the largest difference of a log-probability."""
    draws = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in adapted.parameters():
            parameter += size * torch.randn(parameter.shape, generator=draws)
    version = adapter_engine.policy_version + 1
    started = time.perf_counter()
    adapter_engine.load_weights(MergedState(adapted), policy_version=version)
    say(f"\nadapter swapped in {time.perf_counter() - started:.3f} s")
    return prove(adapter_engine, adapted, prompts)["sync/logprob_max_diff"]


def test_an_adapter_that_has_learned_nothing_is_the_base(
    adapter_engine: VllmSampler, adapted: AdaptedModel, prompts: list[Prompt]
) -> None:
    assert policy_difference(adapter_engine, adapted, prompts, seed=0) <= TOLERANCE


def test_after_two_swaps_the_engine_is_the_policy_and_only_the_adapter_went_there(
    adapter_engine: VllmSampler, adapted: AdaptedModel, prompts: list[Prompt]
) -> None:
    for seed in (1, 2):
        assert swap(adapter_engine, adapted, prompts, seed=seed) <= TOLERANCE
        assert policy_difference(adapter_engine, adapted, prompts, seed=seed) <= TOLERANCE
    assert {r.policy_version for r in rollouts_of(adapter_engine.sample(prompts, PARAMS, seed=2))} == {2}
    (served,) = adapter_engine._spec.weight_dir.iterdir()
    size = sum(path.stat().st_size for path in served.iterdir())
    assert size < 0.5 * sum(path.stat().st_size for path in adapter_engine._spec.model.glob("*.safetensors"))


def test_an_adapter_that_the_engine_refuses_leaves_the_one_before_on_a_fresh_server(
    adapter_engine: VllmSampler, adapted: AdaptedModel, prompts: list[Prompt]
) -> None:
    version, first = adapter_engine.policy_version, adapter_engine._process
    larger = add_lora(adapted, LoraConfig(rank=64, alpha=16), "larger", seed=0)  # the server has room for rank 8
    with pytest.raises(SamplingError, match="could not be sent to the engine"):
        adapter_engine.load_weights(MergedState(larger), policy_version=version + 1)
    assert adapter_engine._process is not first
    assert adapter_engine.policy_version == version
    assert policy_difference(adapter_engine, adapted, prompts, seed=3) <= TOLERANCE
    assert swap(adapter_engine, adapted, prompts, seed=4) <= TOLERANCE


def test_an_adapter_that_is_not_applied_is_seen_however_little_it_has_learned(
    adapter_engine: VllmSampler,
    adapted: AdaptedModel,
    prompts: list[Prompt],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """The server is given the adapter of before; a step of 1e-7 shows in no log-probability."""
    stale = Weights(path=shutil.copytree(adapter_engine.served.path, tmp_path / "stale"), is_adapter=True)
    with monkeypatch.context() as patched:
        patched.setattr(syncing, "publish", lambda group, _, version, send: publish(group, stale, version, send))
        with pytest.raises(StaleSamplerError, match="adapter of layer 0, adapter of layer 1"):
            swap(adapter_engine, adapted, prompts, seed=3, size=1e-7)
    assert swap(adapter_engine, adapted, prompts, seed=4) <= TOLERANCE


def test_a_policy_whose_adapter_is_not_asked_for_is_seen(
    adapter_engine: VllmSampler, adapted: AdaptedModel, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right weights in the server, and completions of its base."""
    with monkeypatch.context() as patched:
        patched.setattr(type(adapter_engine), "_adapter", lambda _: {})
        with pytest.raises((CanaryError, StaleSamplerError)):
            swap(adapter_engine, adapted, prompts, seed=5)
    assert swap(adapter_engine, adapted, prompts, seed=6) <= TOLERANCE
