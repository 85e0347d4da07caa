from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from rlcore.config import EngineConfig, GpuConfig, LoraConfig, ModelConfig, RejectionConfig, SamplingConfig, ShapeConfig
from rlcore.errors import ConfigError, SamplingError
from rlcore.flows.presets import open_preset
from rlcore.hardware.runtime import Runtime
from rlcore.models.importing import import_model
from rlcore.sampling.base import Sampler
from rlcore.sampling.native import NativeSampler
from rlcore.sampling.vllm.client import Address
from rlcore.sampling.vllm.gpu_assignment import VisibleGpus
from rlcore.sampling.vllm.process import ServerSpec, command
from rlcore.tasks.kinds.rejection.kind import RejectionStage
from rlcore.tasks.kinds.rl.kind import RlStage
from rlcore.tasks.steps import vllm_engine
from rlcore.tasks.steps.rollout_engine import longest, open_engine
from rlcore.tasks.steps.vllm_engine import server_specs
from rlcore.tasks.steps.workload import Workload, engine_dtype
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import Prompt

CPU = Runtime(device=torch.device("cpu"), compute_dtype=torch.float32)
RANKS = "distributed={backend='processes',learner_ranks=2}"
WORK = Workload(max_concurrent=4, max_tokens=64)
SHAPE = ShapeConfig(hidden_size=32, num_layers=1, num_heads=4, num_kv_heads=2, intermediate_size=48, max_positions=128)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engine") / "model"
    import_model(ModelConfig(source="scratch", shape=SHAPE), folder, seed=0)
    return folder


def vllm(**settings: Any) -> EngineConfig:
    return EngineConfig(kind="vllm", **settings)


@contextmanager
def opened(checkpoint: Path, config: EngineConfig, work: Workload = WORK) -> Iterator[Sampler]:
    tokenizer = ChatTokenizer.load(checkpoint)
    with open_engine(checkpoint, tokenizer, config=config, work=work, runtime=CPU, progress=print) as engine:
        yield engine


def test_the_engine_is_the_built_in_one_unless_another_is_named(checkpoint: Path) -> None:
    with opened(checkpoint, EngineConfig()) as engine:
        assert isinstance(engine, NativeSampler)


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        (vllm(max_model_len=129), ConfigError, "the model has 128 positions"),
        (vllm(weight_transfer="nccl"), ConfigError, "nccl sends weights from GPU to GPU, but this run trains on cpu"),
    ],
)
def test_an_engine_that_cannot_be_is_refused_before_anything_is_started(
    config: EngineConfig, error: type[Exception], message: str, checkpoint: Path
) -> None:
    with pytest.raises(error, match=message), opened(checkpoint, config):
        pass


def test_an_engine_that_does_not_start_leaves_no_folder(checkpoint: Path, tmp_path: Path) -> None:
    missing = vllm(python=str(tmp_path / "none"), weight_dir=str(tmp_path), replicas=2)
    with pytest.raises(SamplingError, match=r"the interpreter .* does not exist"), opened(checkpoint, missing):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def make(checkpoint: Path) -> Callable[..., list[ServerSpec]]:
    """The servers of an engine beside a trainer on the first of ``count`` GPUs, or without any."""

    def specs(
        config: EngineConfig, *, count: int = 0, rank: int = 0, can_send: bool = False, turns: bool = True
    ) -> list[ServerSpec]:
        whole = ServerSpec(
            model=checkpoint, weight_dir=Path(), config=config, dtype="float32", max_model_len=128, max_concurrent=9,
            sleeps=turns,
        )  # fmt: skip
        cards = VisibleGpus(count=count, trainer=0 if count else None, learns=True)
        device = torch.device("cuda" if count else "cpu")
        made = server_specs(whole, cards, device, lora_rank=rank, can_send=can_send)
        made[0].weight_dir.rmdir()  # it is there, and empty
        return made

    return specs


def test_servers_share_what_is_under_way_and_an_adapter_goes_only_to_those_of_ours(
    make: Callable[..., list[ServerSpec]],
) -> None:
    two = make(vllm(replicas=2), rank=4)
    assert [spec.max_concurrent for spec in two] == [5, 5]
    assert two[0].weight_dir == two[1].weight_dir  # all of them read one file
    assert [(spec.transfer, spec.lora_rank, spec.url) for spec in two] == [("shared_memory", 4, "")] * 2
    (attached,) = make(vllm(urls=("http://a:1",)), rank=4)
    assert (attached.transfer, attached.lora_rank, attached.url) == ("file", 0, "http://a:1")
    assert [make(vllm(), rank=rank)[0].lora_rank for rank in (0, 512, 513)] == [0, 512, 0]


def test_eight_gpus_are_one_trainer_and_seven_engines_joined_by_nccl_where_vllm_is_here_too(
    make: Callable[..., list[ServerSpec]],
) -> None:
    seven = make(vllm(replicas=7), count=8, can_send=True)
    assert [spec.devices for spec in seven] == [(n,) for n in range(1, 8)]
    assert {(spec.transfer, spec.gpu_memory_utilization) for spec in seven} == {("nccl", 0.85)}
    assert {spec.transfer for spec in make(vllm(replicas=7), count=8)} == {"shared_memory"}
    assert not any(spec.sleeps for spec in seven)
    (shared,) = make(vllm(), count=1, can_send=True)
    assert (shared.devices, shared.transfer, shared.gpu_memory_utilization) == ((0,), "shared_memory", 0.4)
    attached = make(vllm(urls=("http://a:1", "http://b:1")), count=8, can_send=True)
    assert [(spec.devices, spec.transfer) for spec in attached] == [((), "file")] * 2


def test_a_server_on_the_learners_gpu_sleeps_if_they_take_turns_and_on_a_cpu_there_is_nothing_to_release(
    make: Callable[..., list[ServerSpec]],
) -> None:
    both = vllm(replicas=2, gpus=GpuConfig(devices=(1, 0)))
    for config, count, turns, sleeps in (
        (vllm(), 1, True, [True]),
        (vllm(), 1, False, [False]),  # it samples ahead, or the learner's memory is that of other processes
        (both, 2, True, [False, True]),
        (vllm(), 0, True, [False]),
        (vllm(urls=("http://a:1",)), 1, True, [False]),
    ):
        specs = make(config, count=count, turns=turns)
        assert [spec.sleeps for spec in specs] == sleeps
        lines = [command(spec, "python", Address("127.0.0.1", 1)) for spec in specs]
        assert ["--enable-sleep-mode" in line for line in lines] == sleeps


@pytest.mark.parametrize(
    ("overrides", "expected"), [((), True), (("stages.grpo.sampling.staleness=1",), False), ((RANKS,), False)]
)
def test_engine_and_learner_take_turns_where_no_rollouts_are_due_and_memory_is_in_reach(
    overrides: tuple[str, ...], expected: bool
) -> None:
    config = open_preset("tiny", ("engine.kind=vllm", *overrides))
    staleness = config.stage("grpo", RlStage).settings.sampling.staleness
    assert config.distributed.takes_turns(staleness=staleness) == expected


def test_an_engine_computes_in_the_trainers_precision_unless_a_server_is_told_another() -> None:
    half, none = dataclasses.replace(CPU, compute_dtype=torch.bfloat16), LoraConfig()
    assert engine_dtype(vllm(), half, none) == torch.bfloat16
    assert engine_dtype(vllm(), dataclasses.replace(CPU, compute_dtype=torch.float16), none) == torch.float16
    assert engine_dtype(vllm(dtype="float32"), half, none) == torch.float32
    native = EngineConfig(dtype="bfloat16")
    assert engine_dtype(native, CPU, none) == torch.float32  # the native engine's is the trainer's
    assert engine_dtype(native, half, none) == torch.bfloat16
    assert engine_dtype(native, half, LoraConfig(rank=8)) == torch.float32  # a merged adapter would be rounded away


@pytest.mark.parametrize(("max_tokens", "named", "expected"), [(40, 0, 41), (128, 0, 128), (40, 100, 100)])
def test_an_engine_has_room_for_the_longest_text_of_the_run_and_no_more(
    max_tokens: int, named: int, expected: int, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[ServerSpec] = []

    @contextmanager
    def servers(specs: list[ServerSpec], *_: object) -> Iterator[None]:
        started.extend(specs)
        yield
        specs[0].weight_dir.rmdir()

    monkeypatch.setattr(vllm_engine, "open_servers", servers)
    work = Workload(max_concurrent=4, max_tokens=max_tokens, learns_meanwhile=True)
    with opened(checkpoint, vllm(max_model_len=named), work):
        (spec,) = started
    assert spec.max_model_len == expected
    assert spec.enforce_eager == (not spec.prefill_in_parts) == (not torch.cuda.device_count())
    assert spec.trainer_moves


def test_the_longest_text_is_the_longest_prompt_with_a_whole_completion() -> None:
    prompts = [Prompt(prompt_id="q", messages=(), token_ids=(1,) * n, reference="", task="t") for n in (3, 7, 5)]
    assert longest(prompts, 10) == 17


def test_a_section_samples_with_its_own_engine_or_the_runs() -> None:
    config = open_preset("reasoning", ("engine.kind=vllm", "evaluation.engine.kind=native"))
    assert config.engine_of(config.evaluation).kind == "native"
    assert config.engine_of(config.stage("rejection", RejectionStage).settings.sampling).kind == "vllm"
    assert open_preset("tiny").engine.kind == "native"


def test_rejection_sampling_has_no_updates_to_run_ahead_of() -> None:
    with pytest.raises(ConfigError, match="staleness is only valid for kind"):
        RejectionConfig(num_samples=1, rewards=(), sampling=SamplingConfig(max_new_tokens=8, staleness=1))
