"""A real vLLM server against the trainer: log-probabilities, weight sync and its faults, death in the middle.

`make test-engine` runs it; the interpreter of the engine's environment is in ENGINE_PYTHON.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from rlcore.errors import SamplingError, StaleSamplerError
from rlcore.metrics import check_names
from rlcore.sampling.base import SamplingParams, sleep_engine
from rlcore.sampling.native import NativeSampler
from rlcore.sampling.vllm.client import call
from rlcore.sampling.vllm.server import VllmSampler
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import FailedRollout, Message, Prompt, Rollout
from tests.integration import vllm_runs
from tests.integration.vllm_runs import PARAMS, TOLERANCE, killed_after, lose, rollouts_of, say, sync, worst_difference

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
