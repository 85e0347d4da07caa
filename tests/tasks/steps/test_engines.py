"""Parts that sample and learn: rollout engines, runtimes, and facts of algorithms."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlcore.algorithms.table import ALGORITHMS, resolve_algorithm
from rlcore.checks.settings import algorithm_errors
from rlcore.config import (
    BackboneConfig,
    EngineConfig,
    GpuConfig,
    HardwareConfig,
    KlConfig,
    LoraConfig,
    ModelConfig,
    ObjectiveConfig,
    RlConfig,
    SamplingConfig,
    ShapeConfig,
    UpdateConfig,
)
from rlcore.distributed import build
from rlcore.distributed.build import LearnerPlan, make_policy
from rlcore.errors import ConfigError, SamplingError
from rlcore.flows.presets import open_preset
from rlcore.models.importing import import_model
from rlcore.models.lora import AdaptedModel
from rlcore.models.memory_meter import measure_peak
from rlcore.models.policy import completion_logprobs
from rlcore.models.runtime import Runtime
from rlcore.sampling.base import Sampler
from rlcore.sampling.native import NativeSampler
from rlcore.sampling.vllm.client import Address
from rlcore.sampling.vllm.gpu_assignment import VisibleGpus
from rlcore.sampling.vllm.process import ServerSpec, command
from rlcore.tasks.kinds.rl.kind import RlStage
from rlcore.tasks.steps import vllm_engine
from rlcore.tasks.steps.algorithm_facts import algorithm_facts, uses_critic
from rlcore.tasks.steps.base import MODEL
from rlcore.tasks.steps.rollout_engine import open_engine
from rlcore.tasks.steps.runtime import Workload, engine_dtype, open_runtime
from rlcore.tasks.steps.vllm_engine import server_specs
from rlcore.text.packing import pack
from rlcore.text.tokenization import ChatTokenizer
from rlcore.training.reward_learner import reward_backbone
from tests import strategies
from tests.learners import update_config

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


def test_servers_share_the_requests_and_an_adapter_goes_to_ours(make: Callable[..., list[ServerSpec]]) -> None:
    two = make(vllm(replicas=2), rank=4)
    assert [spec.max_concurrent for spec in two] == [5, 5]
    assert two[0].weight_dir == two[1].weight_dir  # all of them read one file
    assert [(spec.transfer, spec.lora_rank, spec.url) for spec in two] == [("shared_memory", 4, "")] * 2
    (attached,) = make(vllm(urls=("http://a:1",)), rank=4)
    assert (attached.transfer, attached.lora_rank, attached.url) == ("file", 0, "http://a:1")
    assert [make(vllm(), rank=rank)[0].lora_rank for rank in (0, 512, 513)] == [0, 512, 0]


def test_eight_gpus_are_one_trainer_and_seven_engines_on_nccl(make: Callable[..., list[ServerSpec]]) -> None:
    seven = make(vllm(replicas=7), count=8, can_send=True)
    assert [spec.devices for spec in seven] == [(n,) for n in range(1, 8)]
    assert {(spec.transfer, spec.gpu_memory_utilization) for spec in seven} == {("nccl", 0.85)}
    assert {spec.transfer for spec in make(vllm(replicas=7), count=8)} == {"shared_memory"}
    assert not any(spec.sleeps for spec in seven)
    (shared,) = make(vllm(), count=1, can_send=True)
    assert (shared.devices, shared.transfer, shared.gpu_memory_utilization) == ((0,), "shared_memory", 0.4)
    attached = make(vllm(urls=("http://a:1", "http://b:1")), count=8, can_send=True)
    assert [(spec.devices, spec.transfer) for spec in attached] == [((), "file")] * 2


def test_a_server_on_the_learners_gpu_sleeps_if_they_take_turns(make: Callable[..., list[ServerSpec]]) -> None:
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
def test_engine_and_learner_take_turns_without_prefetch_or_ranks(overrides: tuple[str, ...], expected: bool) -> None:
    config = open_preset("tiny", ("engine.kind=vllm", *overrides))
    staleness = config.stage("grpo", RlStage).settings.sampling.staleness
    assert config.distributed.takes_turns(staleness=staleness) == expected


def test_an_engine_computes_in_the_trainers_precision_unless_another_is_set() -> None:
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


def test_the_base_of_an_adapter_rounds_as_its_engine_does(start: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_layers_under_an_adapter_are_recomputed_if_set(start: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


RUNTIME_CPU = HardwareConfig(device="cpu")


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


def test_a_stage_begins_and_ends_with_free_memory_also_when_it_fails(emptied: list[bool]) -> None:
    with pytest.raises(ZeroDivisionError), open_runtime(RUNTIME_CPU, seed=0):
        assert emptied == [True]
        raise ZeroDivisionError
    assert emptied == [True, True]


def test_without_a_gpu_there_is_nothing_to_free(emptied: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with open_runtime(RUNTIME_CPU, seed=0):
        pass
    assert emptied == []


@pytest.mark.parametrize(
    ("dtype", "save_float32", "like_start"),
    [("float32", False, False), ("bfloat16", False, True), ("float16", False, True), ("bfloat16", True, False)],
)
def test_only_half_precision_is_passed_on_as_such(dtype: Any, save_float32: bool, like_start: bool) -> None:
    hardware = HardwareConfig(device="cpu", dtype=dtype, save_float32=save_float32)
    with open_runtime(hardware, seed=0) as opened:
        assert opened.like_start is like_start


BASE = RlConfig(
    algorithm="grpo",
    num_iterations=50,
    prompts_per_iteration=12,
    group_size=6,
    learning_rate=3e-6,
    sampling=SamplingConfig(max_new_tokens=300),
)
VARIANTS = {
    "plain": BASE,
    "alone": replace(BASE, group_size=1),
    "with KL": replace(BASE, kl=KlConfig(coefficient=0.03)),
    "with KL in the reward": replace(BASE, kl=KlConfig(coefficient=0.03, apply_to="reward")),
    "with rounds": replace(BASE, sampling=SamplingConfig(max_new_tokens=9, dynamic_sampling_rounds=4)),
    "skipping": replace(BASE, sampling=SamplingConfig(max_new_tokens=9, zero_signal_keep_prob=0.2)),
    "scaled": replace(BASE, update=UpdateConfig(objective=ObjectiveConfig(scale="batch"))),
    "clipped": replace(BASE, update=UpdateConfig(objective=ObjectiveConfig(clip_low=0.1))),
    "constant": replace(BASE, update=UpdateConfig(objective=ObjectiveConfig(weighting="constant"))),
    "penalized": replace(BASE, update=UpdateConfig(num_epochs=2, objective=ObjectiveConfig(penalty_target=0.1))),
    "gated": replace(BASE, update=UpdateConfig(objective=ObjectiveConfig(gate_positive=2.0))),
}


@pytest.mark.parametrize("algorithm", [*ALGORITHMS, "grop"])
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_they_are_those_of_the_resolved_algorithm(algorithm: str, variant: RlConfig) -> None:
    rl = replace(variant, algorithm=algorithm)
    facts = algorithm_facts(rl)
    assert list(facts.errors) == list(algorithm_errors(rl))
    try:
        resolved = resolve_algorithm(rl)
    except ConfigError as error:
        with pytest.raises(ConfigError) as caught:
            uses_critic(rl)
        assert str(caught.value) == str(error)
    else:
        assert uses_critic(rl) == resolved.uses_critic
        assert facts.scale == (getattr(resolved.advantage, "keywords", {}).get("scale") or "")
