"""The sampler around an engine in this process; a stand-in for vLLM records what it is told.

tests/integration/test_vllm_in_process.py has vLLM itself.
"""

from __future__ import annotations

import dataclasses
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from rlcore.config import EngineConfig
from rlcore.errors import SamplingError
from rlcore.sampling.base import SamplingParams, sleep_engine
from rlcore.sampling.native import NativeSampler
from rlcore.sampling.vllm.in_process import InProcessSampler, arguments, process_state
from rlcore.sampling.vllm.process import ServerSpec
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import FailedRollout, Prompt, Rollout

PARAMS = SamplingParams(temperature=0.8, max_new_tokens=4, num_samples=2)


class Llm:
    """Completes with the digits of the request's seed."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.weights: dict[str, torch.Tensor] = {}
        self.handed: Mapping[str, torch.Tensor] | None = None
        self.reason = "length"
        self.resets = True

    def generate(self, prompts: Sequence[dict[str, Any]], settings: Sequence[Any], *, use_tqdm: bool) -> list[Any]:
        self.told.append("generate")
        return [self._output(prompt, each) for prompt, each in zip(prompts, settings, strict=True)]

    def _output(self, prompt: dict[str, Any], settings: Any) -> Any:
        tokens = [3 + int(digit) for digit in str(getattr(settings, "seed", 1234))[:4]]
        rows = [{token: SimpleNamespace(logprob=-1.5)} for token in tokens]
        completion = SimpleNamespace(token_ids=tokens, logprobs=rows, finish_reason=self.reason)
        scores = [{token: SimpleNamespace(logprob=-float(token))} for token in prompt["prompt_token_ids"]]
        return SimpleNamespace(outputs=[completion], prompt_logprobs=scores)

    def collective_rpc(self, method: str, args: tuple[Mapping[str, torch.Tensor]]) -> None:
        self.told.append(method)
        self.handed = args[0]
        self.weights = dict(args[0])

    def reset_prefix_cache(self) -> bool:
        self.told.append("reset")
        return self.resets

    def sleep(self, level: int) -> None:
        self.told.append(f"sleep {level}")

    def wake_up(self, tags: list[str]) -> None:
        self.told.append(f"wake {' '.join(tags)}")


@pytest.fixture(autouse=True)
def vllm_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's class of sampling settings, which takes any."""
    module = ModuleType("vllm")
    module.SamplingParams = lambda **settings: SimpleNamespace(**settings)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)


@pytest.fixture
def make(checkpoint: Path, tokenizer: ChatTokenizer) -> Callable[..., tuple[Llm, InProcessSampler]]:
    spec = ServerSpec(
        model=checkpoint,
        weight_dir=Path(),
        config=EngineConfig(kind="vllm_inprocess"),
        dtype="bfloat16",
        max_model_len=32,
        max_concurrent=4,
    )

    def build(*, sleeps: bool = False) -> tuple[Llm, InProcessSampler]:
        llm = Llm()
        return llm, InProcessSampler(llm, spec, tokenizer, sleeps=sleeps, free=lambda: llm.told.append("free"))

    return build


def test_every_completion_has_a_seed_of_its_own_and_stands_with_its_prompt(
    make: Callable[..., tuple[Llm, InProcessSampler]], prompts: list[Prompt]
) -> None:
    _, sampler = make()
    long = dataclasses.replace(prompts[0], prompt_id="long", token_ids=(5,) * 30)
    groups = sampler.sample([prompts[0], long, prompts[2]], PARAMS, seed=1, places=[7, 8, 9])
    assert [[item.prompt.prompt_id for item in group] for group in groups] == [["3+4"] * 2, ["long"] * 2, ["1"] * 2]
    assert [[type(item) for item in group] for group in groups] == [
        [Rollout] * 2,
        [FailedRollout] * 2,
        [Rollout] * 2,
    ]
    rollouts = [item for group in groups for item in group if isinstance(item, Rollout)]
    assert len({r.completion_ids for r in rollouts}) == 4
    assert sampler.sample([prompts[2]], PARAMS, seed=1, places=[9])[0] == groups[2]
    assert {r.sampler_logprobs for r in rollouts} == {(-1.5,) * 4}


def test_a_completion_that_the_engine_ends_fails_alone(
    make: Callable[..., tuple[Llm, InProcessSampler]], prompts: list[Prompt]
) -> None:
    llm, sampler = make()
    llm.reason = "abort"
    ((failed, _),) = sampler.sample(prompts[:1], PARAMS, seed=1)
    assert isinstance(failed, FailedRollout)
    assert "'abort'" in failed.reason


def test_a_text_is_scored_from_the_place_where_the_completion_begins(
    make: Callable[..., tuple[Llm, InProcessSampler]],
) -> None:
    _, sampler = make()
    assert sampler.logprobs([3, 4], [5, 6], temperature=1.0) == [-5.0, -6.0]


def test_weights_go_over_in_the_engines_precision_and_the_old_ones_cache_is_dropped(
    make: Callable[..., tuple[Llm, InProcessSampler]], model: PreTrainedModel, prompts: list[Prompt]
) -> None:
    llm, sampler = make()
    sampler.load_weights(model.state_dict(), policy_version=5)
    assert llm.told == ["take_weights", "reset"]
    assert "lm_head.weight" not in llm.weights  # tied: once
    assert {tensor.dtype for tensor in llm.weights.values()} == {torch.bfloat16}
    (rollout, _) = sampler.sample(prompts[:1], PARAMS, seed=1)[0]
    assert isinstance(rollout, Rollout)
    assert rollout.policy_version == sampler.policy_version == 5


def test_weights_that_do_not_fit_are_not_handed_over_and_a_cache_that_stays_is_an_error(
    make: Callable[..., tuple[Llm, InProcessSampler]], model: PreTrainedModel
) -> None:
    llm, sampler = make()
    with pytest.raises(SamplingError, match="is missing"):
        sampler.load_weights({}, policy_version=1)
    assert llm.told == []
    llm.resets = False
    with pytest.raises(SamplingError, match="did not drop the prefix cache"):
        sampler.load_weights(model.state_dict(), policy_version=1)
    assert sampler.policy_version == 0


def test_beside_a_learner_the_engine_rests_during_an_update_and_wakes_once_for_the_new_weights(
    make: Callable[..., tuple[Llm, InProcessSampler]], model: PreTrainedModel, prompts: list[Prompt]
) -> None:
    llm, sampler = make(sleeps=True)
    sampler.sample(prompts[:1], PARAMS, seed=1)
    sleep_engine(sampler)
    sleep_engine(sampler)
    with pytest.raises(SamplingError, match="the engine is asleep"):
        sampler.logprobs([3], [4], temperature=1.0)
    sampler.load_weights(model.state_dict(), policy_version=1)
    sampler.logprobs([3], [4], temperature=1.0)
    sampler.sample(prompts[:1], PARAMS, seed=1)
    assert llm.told == [
        *("generate", "sleep 2"),
        *("free", "wake weights", "take_weights", "free", "wake kv_cache", "reset"),
        *("generate", "generate"),
    ]


def test_an_engine_that_shares_no_gpu_never_rests(
    make: Callable[..., tuple[Llm, InProcessSampler]], prompts: list[Prompt], model: PreTrainedModel
) -> None:
    llm, sampler = make()
    sleep_engine(sampler)
    sampler.sample(prompts[:1], PARAMS, seed=1)
    assert llm.told == ["generate"]
    sleep_engine(NativeSampler(model, sampler._tokenizer))


def test_weights_are_not_copied_as_a_whole(
    make: Callable[..., tuple[Llm, InProcessSampler]], model: PreTrainedModel
) -> None:
    llm, sampler = make()
    state = model.state_dict()
    sampler.load_weights(state, policy_version=1)
    assert llm.handed is not None
    assert not isinstance(llm.handed, dict)  # each is converted when it is read
    with torch.no_grad():
        state["model.norm.weight"].fill_(7.0)
    assert llm.handed["model.norm.weight"].unique().tolist() == [7.0]


def test_vllm_is_told_how_much_of_which_gpu_is_its_own(checkpoint: Path) -> None:
    spec = ServerSpec(
        model=checkpoint,
        weight_dir=Path(),
        config=EngineConfig(kind="vllm_inprocess", kv_cache_gib=0.5),
        dtype="float16",
        max_model_len=32,
        max_concurrent=4,
        devices=(2,),
        gpu_memory_utilization=0.4,
        enforce_eager=False,
    )
    told = arguments(spec, sleeps=True)
    assert (told["device_ids"], told["gpu_memory_utilization"], told["enable_sleep_mode"]) == ([2], 0.4, True)
    assert (told["dtype"], told["enforce_eager"], told["kv_cache_memory_bytes"]) == ("float16", False, 2**29)
    first = arguments(dataclasses.replace(spec, devices=(0,), config=EngineConfig()), sleeps=False)
    assert not {"device_ids", "kv_cache_memory_bytes"} & first.keys()
    assert not first["enable_sleep_mode"]


def test_what_vllm_changes_in_the_process_is_put_back() -> None:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    before = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())  # type: ignore[index]
    set_threads, threads = torch.set_num_threads, torch.get_num_threads()
    with pytest.raises(ZeroDivisionError), process_state():
        random.seed(2)
        np.random.seed(2)
        torch.manual_seed(2)
        torch.set_num_threads(threads + 1)
        torch.set_num_threads = lambda count: None
        raise ZeroDivisionError
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before  # type: ignore[index]
    assert torch.set_num_threads is set_threads
    assert torch.get_num_threads() == threads
