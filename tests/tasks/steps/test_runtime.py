from __future__ import annotations

import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlcore.config import BackboneConfig, EngineConfig, HardwareConfig, LoraConfig, SamplingConfig
from rlcore.distributed import build
from rlcore.distributed.build import LearnerPlan, make_policy
from rlcore.hardware.memory_meter import measure_peak
from rlcore.hardware.out_of_memory import empty_cache
from rlcore.hardware.runtime import Runtime
from rlcore.models.lora import AdaptedModel
from rlcore.models.policy import completion_logprobs
from rlcore.tasks.steps.base import MODEL
from rlcore.tasks.steps.runtime import open_runtime
from rlcore.text.packing import pack
from rlcore.training.reward_learner import reward_backbone
from tests import strategies
from tests.learners import update_config

ADAPTER = LoraConfig(rank=2)


def runtime(*, recompute: bool) -> Runtime:
    return Runtime(device=torch.device("cpu"), compute_dtype=torch.float32, gradient_checkpointing=recompute)


@pytest.fixture
def start(tmp_path: Path) -> Path:
    strategies.tiny_llama().save_pretrained(tmp_path / MODEL)
    return tmp_path


def policy_of_a_run(start: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch, engine: str = "native") -> Any:
    """The policy as an RL run loads it; the tiny model has no tokenizer to be checked with."""
    monkeypatch.setattr(build, "ChatTokenizer", SimpleNamespace(load=lambda folder: None))
    monkeypatch.setattr(build, "check_model", lambda *_: None)
    sampling = SamplingConfig(max_new_tokens=8, engine=EngineConfig(kind=engine))  # type: ignore[arg-type]
    rl = strategies.rl_config("grpo", update=update_config(lora=ADAPTER), sampling=sampling)
    plan = LearnerPlan(start=start / MODEL, critic_start=start / MODEL, config=rl, seed=0)
    return make_policy(plan, runtime)


def test_with_vllm_an_adapters_base_rounds_as_it_does_and_else_its_states_are_float32(
    start: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = Runtime(device=torch.device("cpu"), compute_dtype=torch.bfloat16)
    for engine, dtype in (("native", torch.float32), ("vllm", torch.bfloat16)):
        policy = policy_of_a_run(start, half, monkeypatch, engine)
        sequences = strategies.random_sequences(1, num_prompts=1, group_size=1, max_tokens=8)
        (batch,) = pack(sequences, tokens_per_microbatch=100)
        seen: list[torch.dtype] = []
        policy.base.model.norm.register_forward_hook(lambda *given, seen=seen: seen.append(given[2].dtype))
        completion_logprobs(policy, batch)
        assert seen == [dtype]


def activations(model: AdaptedModel) -> int:
    """Bytes that a forward pass keeps for its backward pass."""
    sequences = strategies.random_sequences(1, num_prompts=8, group_size=4, max_tokens=30)
    with measure_peak([model], []) as meter:
        (batch,) = pack(sequences, tokens_per_microbatch=10_000)
        completion_logprobs(model, batch)[0].sum().backward()
    return int(meter.activations)


def recomputes(model: torch.nn.Module) -> bool:
    """True if any layer computes its activations again; the library's own name for it has changed."""
    return any(getattr(each, "gradient_checkpointing", False) for each in model.modules())


def test_layers_of_an_adapters_base_are_recomputed_where_the_setting_says_so(
    start: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for load in (
        lambda runtime: policy_of_a_run(start, runtime, monkeypatch),
        lambda runtime: reward_backbone(start / MODEL, BackboneConfig(lora=ADAPTER), runtime, seed=0),
    ):
        plain, again = load(runtime(recompute=False)), load(runtime(recompute=True))
        assert (recomputes(plain.base), recomputes(again.base)) == (False, True)
        assert activations(again) < activations(plain)


@pytest.mark.parametrize("recompute", [False, True])
def test_what_learns_whole_is_recomputed_and_what_only_scores_is_not(start: Path, recompute: bool) -> None:
    made = runtime(recompute=recompute)
    assert recomputes(made.load_trainable(start / MODEL)) == recompute
    assert not recomputes(made.load_frozen(start / MODEL))


CPU = HardwareConfig(device="cpu")


class Layer:
    """Holds itself, as an adapter's layer does."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def emptied(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return True if a layer that nothing uses was gone, each time that the cache of a GPU was emptied."""
    found: list[bool] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: found.append(unused() is None))
    unused = weakref.ref(Layer())
    return found


def test_what_holds_itself_is_gone_when_the_cache_is_emptied(emptied: list[bool]) -> None:
    empty_cache()
    assert emptied == [True]


def test_a_stage_begins_and_ends_with_free_memory_also_when_it_fails(emptied: list[bool]) -> None:
    with pytest.raises(ZeroDivisionError), open_runtime(CPU, seed=0):
        assert emptied == [True]
        raise ZeroDivisionError
    assert emptied == [True, True]


def test_without_a_gpu_there_is_nothing_to_free(emptied: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with open_runtime(CPU, seed=0):
        pass
    assert emptied == []


@pytest.mark.parametrize(
    ("dtype", "save_float32", "like_start"),
    [("float32", False, False), ("bfloat16", False, True), ("float16", False, True), ("bfloat16", True, False)],
)
def test_only_what_was_computed_in_half_precision_is_handed_on_in_it(
    dtype: Any, save_float32: bool, like_start: bool
) -> None:
    hardware = HardwareConfig(device="cpu", dtype=dtype, save_float32=save_float32)
    with open_runtime(hardware, seed=0) as opened:
        assert opened.like_start is like_start
