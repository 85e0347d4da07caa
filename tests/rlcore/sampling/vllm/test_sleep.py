"""A server that shares a GPU sleeps during updates; one with room for an adapter is sent nothing else."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from rlcore.config import LoraConfig
from rlcore.errors import SamplingError
from rlcore.models.lora import AdaptedModel, MergedState, add_lora
from rlcore.sampling.base import Sampler, SamplingParams, sleep_engine
from rlcore.sampling.native import NativeSampler
from rlcore.sampling.replicas import open_servers
from rlcore.sampling.vllm import server, server_sync
from rlcore.sampling.vllm.client import Address, ControlGroup, EngineControl
from rlcore.sampling.vllm.process import ServerSpec, command, environment
from rlcore.sampling.vllm.server import VllmSampler
from rlcore.sampling.vllm.server_sync import publish
from rlcore.sampling.vllm.weights import Weights, checkpoint_shapes, discard, pack
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import Prompt, Rollout
from tests.rlcore.sampling.servers import interpreter, server_spec
from tests.waiting import until_ended

PARAMS = SamplingParams(temperature=0.8, max_new_tokens=2, num_samples=1)

GENERATE, WAKE = "/inference/v1/generate", "/wake_up?tags="

SYNC = ["/pause?mode=keep", "receive_weights", "/reset_prefix_cache?reset_running_requests=true"]

SYNC += ["/update_weight_version", "/resume"]

FRESH = "/update_weight_version 0"


@pytest.fixture
def spec(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ServerSpec:
    script = Path(__file__).with_name("sleeping_server.py")
    python = interpreter(tmp_path, f'exec {sys.executable} -S {script} "$@"')
    for name in ("stand-in", "weights"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("STAND_IN", str(tmp_path / "stand-in"))
    return server_spec(checkpoint, tmp_path / "weights", engine={"python": python}, sleeps=True)


@pytest.fixture
def opened(spec: ServerSpec, tokenizer: ChatTokenizer) -> Iterator[Callable[..., Sampler]]:
    with ExitStack() as stack:
        yield lambda *sleeps: stack.enter_context(
            open_servers([dataclasses.replace(spec, sleeps=each) for each in sleeps], tokenizer, lambda line: None)
        )


@pytest.fixture
def engine(opened: Callable[..., Sampler]) -> VllmSampler:
    made = opened(True)
    assert isinstance(made, VllmSampler)
    return made


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "stand-in" / "log"


def routes(log: Path) -> list[str]:
    """Requests so far, but for the version that a fresh server is told."""
    return [line.partition(" ")[0] for line in log.read_text(encoding="utf-8").splitlines() if line != FRESH]


def versions(engine: Sampler, prompts: list[Prompt]) -> set[int]:
    rollouts = [each for group in engine.sample(prompts, PARAMS, seed=1) for each in group]
    assert all(isinstance(each, Rollout) for each in rollouts), rollouts
    return {each.policy_version for each in rollouts if isinstance(each, Rollout)}


def test_weights_wake_for_the_sync_and_the_cache_when_they_are_verified(
    engine: VllmSampler, model: PreTrainedModel, prompts: list[Prompt], log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def freed() -> None:  # of a GPU, before the server allocates
        with log.open("a", encoding="utf-8") as file:
            file.write("free\n")

    engine.load_weights(model.state_dict(), policy_version=1)
    assert versions(engine, prompts[:1]) == {1}
    sleep_engine(engine)
    sleep_engine(engine)
    for asked in (
        lambda: engine.sample(prompts, PARAMS, seed=1),
        lambda: engine.logprobs([3], [4], temperature=1.0),
        lambda: engine.differing_parts(model.state_dict()),
    ):
        with pytest.raises(SamplingError, match="the engine is asleep and has no weights"):
            asked()
    with pytest.raises(SamplingError, match="is missing"):
        engine.load_weights({}, policy_version=2)
    for module in (server, server_sync):
        monkeypatch.setattr(module, "empty_cache", freed)
    engine.load_weights(model.state_dict(), policy_version=2)
    assert engine.differing_parts(model.state_dict())  # of no weights
    assert versions(engine, prompts[:1]) == {2}
    assert versions(engine, prompts[:1]) == {2}
    assert routes(log) == [
        *(*SYNC, GENERATE, "/sleep?level=2"),
        *("free", f"{WAKE}weights", *SYNC, "weight_checksums", "free", f"{WAKE}kv_cache", GENERATE, GENERATE),
    ]


def test_the_base_of_a_lora_is_kept(spec: ServerSpec, tokenizer: ChatTokenizer, log: Path) -> None:
    with open_servers([dataclasses.replace(spec, lora_rank=8)], tokenizer, lambda line: None) as engine:
        sleep_engine(engine)
    assert routes(log) == ["/sleep?level=1"]


def test_of_several_servers_those_on_the_learners_gpu_sleep_and_others_are_not_asked(
    opened: Callable[..., Sampler], model: PreTrainedModel, tokenizer: ChatTokenizer, prompts: list[Prompt], log: Path
) -> None:
    engine = opened(True, False)
    sleep_engine(engine)
    engine.load_weights(model.state_dict(), policy_version=1)
    assert versions(engine, prompts[:2]) == {1}
    found = routes(log)
    assert [found.count(each) for each in ("/sleep?level=2", f"{WAKE}weights", f"{WAKE}kv_cache")] == [1, 1, 1]
    assert [found.count(each) for each in (*SYNC, GENERATE)] == [2] * 6
    sleep_engine(NativeSampler(model, tokenizer))


@pytest.mark.parametrize(
    "route",
    [
        *("/sleep?level=2", "", "receive_weights", GENERATE),
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in (f"{WAKE}weights", *SYNC, "weight_checksums", f"{WAKE}kv_cache")
            if each != "receive_weights"
        ),
    ],
)
def test_a_server_that_dies_anywhere_is_restarted_awake_with_its_weights(
    route: str, engine: VllmSampler, model: PreTrainedModel, prompts: list[Prompt], log: Path
) -> None:
    engine.load_weights(model.state_dict(), policy_version=1)
    first = engine._process
    assert first is not None
    log.with_name("trouble").write_text(f"die {route}", encoding="utf-8")
    sleep_engine(engine)
    if not route:  # while the learner computes
        for process in psutil.Process(first._guard.pid).children():
            process.kill()
    engine.load_weights(model.state_dict(), policy_version=2)
    engine.differing_parts(model.state_dict())
    assert versions(engine, prompts[:1]) == {2}
    assert engine._process is not first
    sleep_engine(engine)
    engine.load_weights(model.state_dict(), policy_version=3)
    assert versions(engine, prompts[:1]) == {3}


def test_a_living_server_that_refuses_a_step_stops_the_run_and_has_the_old_weights(
    engine: VllmSampler, model: PreTrainedModel, prompts: list[Prompt], log: Path
) -> None:
    trouble = log.with_name("trouble")
    engine.load_weights(model.state_dict(), policy_version=1)
    trouble.write_text("refuse /sleep?level=2", encoding="utf-8")
    with pytest.raises(SamplingError, match="refused /sleep"):
        sleep_engine(engine)
    assert versions(engine, prompts[:1]) == {1}
    trouble.write_text(f"refuse {WAKE}weights", encoding="utf-8")
    sleep_engine(engine)
    with pytest.raises(SamplingError, match=r"could not be sent to the engine: the engine refused /wake_up\?tags=we"):
        engine.load_weights(model.state_dict(), policy_version=2)
    assert versions(engine, prompts[:1]) == {1}
    trouble.write_text(f"refuse {WAKE}kv_cache", encoding="utf-8")
    sleep_engine(engine)
    engine.load_weights(model.state_dict(), policy_version=2)
    with pytest.raises(SamplingError, match=r"refused /wake_up\?tags=kv_cache"):
        engine.sample(prompts, PARAMS, seed=1)
    assert versions(engine, prompts[:1]) == {2}  # asked again


def test_an_update_that_fails_leaves_no_sleeping_server(spec: ServerSpec, tokenizer: ChatTokenizer) -> None:
    pids = list[int]()
    with pytest.raises(ZeroDivisionError), open_servers([spec], tokenizer, lambda line: None) as engine:
        assert isinstance(engine, VllmSampler) and engine._process is not None
        pids += [each.pid for each in psutil.Process(engine._process._guard.pid).children(recursive=True)]
        sleep_engine(engine)
        raise ZeroDivisionError
    until_ended(pids)
    assert pids and not spec.weight_dir.exists()


ADDRESS = Address("127.0.0.1", 1)


@pytest.fixture
def policy(model: PreTrainedModel) -> AdaptedModel:
    adapted = add_lora(model, LoraConfig(rank=4, alpha=8, targets=("q_proj", "down_proj")), "policy", seed=0)
    with torch.no_grad():
        for parameter in adapted.parameters():
            parameter += 0.1
    return adapted


@pytest.fixture
def spec_of_adapters(checkpoint: Path, tmp_path: Path) -> ServerSpec:
    return server_spec(checkpoint, tmp_path, lora_rank=4)


def test_a_server_with_room_for_an_adapter_is_sent_nothing_else_and_another_the_merged_weights(
    policy: AdaptedModel, spec_of_adapters: ServerSpec
) -> None:
    path, shapes = spec_of_adapters.weight_dir / "0", checkpoint_shapes(spec_of_adapters.model)
    weights = pack(MergedState(policy), path, spec=spec_of_adapters, shapes=shapes)
    assert weights.is_adapter
    assert sorted(each.name for each in path.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert len(load_file(path / "adapter_model.safetensors")) == 2 * 2 * 2  # A and B of two layers' two targets
    discard(path)
    assert list(spec_of_adapters.weight_dir.iterdir()) == []
    plain = dataclasses.replace(spec_of_adapters, lora_rank=0)
    weights = pack(MergedState(policy), path, spec=plain, shapes=shapes)
    assert not weights.is_adapter
    stored, merged = dict(weights.tensors()), MergedState(policy)
    assert stored.keys() == shapes.keys()
    assert all(torch.equal(stored[name], merged[name]) for name in shapes)
    discard(path)
    assert list(spec_of_adapters.weight_dir.iterdir()) == []


def test_an_adapter_of_another_model_is_refused_before_it_is_sent(
    policy: AdaptedModel, spec_of_adapters: ServerSpec
) -> None:
    known = checkpoint_shapes(spec_of_adapters.model).items()
    shapes = {name: shape for name, shape in known if "layers.1" not in name}
    with pytest.raises(SamplingError, match=r"layers\.1\.mlp\.down_proj\.weight has no weight of the adapter's shape"):
        pack(MergedState(policy), spec_of_adapters.weight_dir / "0", spec=spec_of_adapters, shapes=shapes)
    assert list(spec_of_adapters.weight_dir.iterdir()) == []


def test_an_adapter_takes_the_place_of_the_one_before_while_the_engine_is_paused(tmp_path: Path) -> None:
    asked = []

    class Quiet(EngineControl):
        def ask(self, path: str, payload: object, *, seconds: float = 0.0) -> dict[str, bool]:
            asked.append((path.partition("?")[0], payload))
            return {"success": True}

    group = ControlGroup([Quiet(ADDRESS, log_tail=str)])
    publish(group, Weights(path=tmp_path, is_adapter=True), 3, lambda weights: pytest.fail("no whole weights are sent"))
    adapter = {"lora_name": "policy", "lora_path": str(tmp_path), "load_inplace": True}
    assert asked == [
        ("/pause", {}),
        ("/v1/load_lora_adapter", adapter),
        ("/reset_prefix_cache", {}),
        ("/update_weight_version", {"new_version": "3"}),
        ("/resume", {}),
    ]


@pytest.mark.parametrize(("rank", "room"), [(1, "8"), (8, "8"), (9, "16"), (300, "320"), (512, "512")])
def test_a_server_is_started_with_room_for_the_rank(rank: int, room: str, spec_of_adapters: ServerSpec) -> None:
    line = command(dataclasses.replace(spec_of_adapters, lora_rank=rank), "python", ADDRESS)
    assert line[line.index("--max-lora-rank") + 1] == room
    assert "--enable-lora" in line
    assert environment(spec_of_adapters, spec_of_adapters.weight_dir)["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    none = dataclasses.replace(spec_of_adapters, lora_rank=0)
    assert "--enable-lora" not in command(none, "python", ADDRESS)
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" not in environment(none, spec_of_adapters.weight_dir)
