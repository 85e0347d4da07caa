"""A learner on ranks (forks here): the results of one process, lost ranks, and what processes send each other."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from rlcore.config import (
    AgentConfig,
    BackboneConfig,
    CheckpointConfig,
    DistributedConfig,
    DpoConfig,
    EngineConfig,
    KlConfig,
    LoraConfig,
    RewardModelConfig,
    RewardTerm,
    RlConfig,
    SamplingConfig,
    SftConfig,
    TimeoutConfig,
)
from rlcore.distributed import local_ranks, rank, rank_pool
from rlcore.distributed.build import LearnerPlan
from rlcore.distributed.build_supervised import SupervisedPlan
from rlcore.distributed.distributed_learner import DistributedLearner
from rlcore.distributed.local_ranks import rank_devices
from rlcore.distributed.rank_pool import RankPool
from rlcore.distributed.serialization import decode, encode
from rlcore.errors import CheckpointError, ConfigError, LearnerLostError, StorageError, TrainingError
from rlcore.hardware.memory import Footprint
from rlcore.loop import TrainResult, train
from rlcore.models.runtime import Runtime
from rlcore.training.scoring_models import ForwardScores
from rlcore.training.update_stats import UpdateStats
from rlcore.types import ToolCall
from tests import strategies
from tests.ranks import Forks
from tests.rlcore.loop.conftest import MakeComponents, Tape, make_components, start
from tests.waiting import LONG

__all__ = ["make_components", "start"]  # fixtures
RUNTIME = Runtime(device=torch.device("cpu"), compute_dtype=torch.float32)
SETTINGS: dict[str, Any] = {"num_iterations": 3, "kl": KlConfig(coefficient=0.1), "learning_rate": 1e-4}
SAMPLES = strategies.random_samples(0, dtype=torch.float32)


def make_group(start: Path, config: RlConfig, notes: list[str], **placement: Any) -> DistributedLearner:
    plan = LearnerPlan(start=start, critic_start=start, config=config, seed=0)
    settings = DistributedConfig(
        **({"backend": "processes", "learner_ranks": 2, "timeout_minutes": LONG / 60.0} | placement)
    )
    ranks = RankPool(Forks([RUNTIME.device] * settings.learner_ranks), 60.0 * settings.timeout_minutes)
    return DistributedLearner(plan, settings, RUNTIME, log=notes.append, ranks=ranks)


@pytest.fixture
def opened(start: Path) -> Iterator[Any]:
    groups: list[DistributedLearner] = []

    def open_group(config: RlConfig | None = None, **placement: Any) -> DistributedLearner:
        groups.append(make_group(start, config or strategies.rl_config(), [], **placement))
        return groups[-1]

    yield open_group
    for each in groups:
        with contextlib.suppress(TrainingError):
            each.close()


def curve(outcome: TrainResult) -> list[dict[str, float]]:
    return [{k: v for k, v in row.items() if "second" not in k and "memory" not in k} for row in outcome.history]


def assert_same_course(found: TrainResult, expected: TrainResult) -> None:
    for ours, theirs in zip(curve(expected), curve(found), strict=True):
        assert theirs == pytest.approx(ours, rel=1e-3, abs=1e-5)


class Killer(Tape):
    """Kills a rank when an iteration is recorded for the first time."""

    def __init__(self, learner: DistributedLearner, iteration: int) -> None:
        super().__init__()
        self._learner, self._iteration = learner, iteration

    def metrics(self, iteration: int, metrics: Any) -> None:
        super().metrics(iteration, metrics)
        if iteration == self._iteration and self._learner._starts == 1:
            os.kill(self._learner.ranks.transport.processes[1].pid, signal.SIGKILL)


@pytest.mark.parametrize("killed_in", [*(pytest.param(n, marks=pytest.mark.scale) for n in (0, 1)), 2])
def test_run_on_ranks_equals_one_process_and_survives_lost_rank(
    killed_in: int, make_components: MakeComponents, opened: Any
) -> None:
    expected = train(make_components(config=SETTINGS, folder="one"), Tape())
    components = make_components(config=SETTINGS | {"checkpoints": CheckpointConfig(every_iterations=1)}, folder="two")
    learner = opened(components.config)
    tape = Killer(learner, killed_in)
    outcome = train(dataclasses.replace(components, learner=learner), tape)
    assert_same_course(outcome, expected)
    assert learner._starts == (2 if killed_in else 1)
    assert any("rank 1 was ended by SIGKILL" in note for note in tape.notes) == bool(killed_in)


def test_ranks_save_one_model(make_components: MakeComponents, opened: Any, start: Path, tmp_path: Path) -> None:
    components = make_components(config=SETTINGS)
    learner = opened(components.config)
    learner.update(SAMPLES, seed=0)
    components.learner.update(SAMPLES, seed=0)
    for name, each in (("ranks", learner), ("one", components.learner)):
        each.save_model(start, tmp_path / name)
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "ranks"))
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(theirs[name], ours[name], rtol=1e-4, atol=1e-5)
    weights = learner.weights()
    assert {*theirs} <= {*weights} and len(weights) == len(list(weights))
    assert all(torch.equal(weights[name], theirs[name]) for name in theirs)
    with pytest.raises(StorageError, match="exists already"):  # raised on the first rank, told here
        learner.save_model(start, tmp_path / "ranks")


def test_error_of_ranks_is_raised(opened: Any, tmp_path: Path) -> None:
    learner = opened()
    learner.save(tmp_path, 1, run_state={"identity": {"config": "a"}})
    learner.wait()
    with pytest.raises(CheckpointError, match="different config"):
        learner.load(tmp_path, identity={"config": "b"})
    assert learner.load(tmp_path, identity={"config": "a"}) == {"identity": {"config": "a"}}  # the ranks are there


def test_silent_rank_times_out(opened: Any) -> None:
    learner = opened()
    learner.ranks._seconds = 0.6  # from now on: they had as long as they needed to start
    os.kill(learner.ranks.transport.processes[0].pid, signal.SIGSTOP)
    with pytest.raises(LearnerLostError, match=r"rank 0 timed out after 0\.01 minutes|rank 1 failed"):
        learner.update(SAMPLES, seed=0)
    with pytest.raises(LearnerLostError, match="no rank is running"):  # never the first weights without a word
        learner.observe_kl(0.1, 3)


def test_restarts_of_ranks_are_limited(opened: Any, tmp_path: Path) -> None:
    learner = opened(max_restarts=1)
    for _ in range(2):
        learner.ranks.transport.processes[0].kill()
        with pytest.raises(LearnerLostError, match="rank 0 was ended by SIGKILL"):
            learner.observe_kl(0.1, 3)
        if learner._starts == 1:
            assert learner.load(tmp_path, identity={}) is None
    with pytest.raises(TrainingError, match="ranks were lost 2 times"):
        learner.load(tmp_path, identity={})


def test_rank_out_of_memory_restarts_smaller(opened: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def short_of_memory(learner: Any, samples: Any, *, seed: int, measure_memory: bool = False) -> None:
        if learner.learner.ranks.rank == 1 and learner.learner.tokens_per_microbatch > 5000:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
        return update(learner, samples, seed=seed, measure_memory=measure_memory)

    update = rank.LocalLearner.update
    monkeypatch.setattr(rank_pool, "_GRACE_SECONDS", 0.5)  # rank 0 waits for rank 1
    monkeypatch.setattr(rank.LocalLearner, "update", short_of_memory)
    learner = opened()
    with pytest.raises(LearnerLostError, match=r"rank 1 ran out of memory \(CUDA out of memory\)"):
        learner.update(SAMPLES, seed=0)
    assert learner.load(tmp_path, identity={}) is None
    assert learner.update(SAMPLES, seed=0)[0].moved
    assert learner._budget == 4096  # half of 8192


def test_plans_round_trip(tmp_path: Path) -> None:
    engine = EngineConfig(kind="vllm", urls=("http://a:1",), timeouts=TimeoutConfig(startup_seconds=9.0))
    sampling = SamplingConfig(max_new_tokens=6, engine=engine, agent=AgentConfig(command=("sh",), env={"A": "b"}))
    rewards = (RewardTerm(kind="length", options={"limit": 4, "buffer": 1.5}),)
    config = strategies.rl_config("ppo", sampling=sampling, rewards=rewards, kl=KlConfig(coefficient=0.1))
    taught = LearnerPlan(start=tmp_path, critic_start=tmp_path, config=config, seed=3, reference=tmp_path / "teacher")
    brief = {"num_epochs": 1, "batch_size": 4, "learning_rate": 1e-2}
    rows = (
        SftConfig(num_steps=3, batch_size=5, learning_rate=1e-2),
        DpoConfig(**brief, lora=LoraConfig(rank=2, targets=("q_proj",))),
        RewardModelConfig(**brief, head_learning_rate=1e-2, backbone=BackboneConfig(layers=1)),
    )
    plans = [SupervisedPlan(start=tmp_path, config=each, seed=3) for each in rows]
    assert decode(encode((taught, *plans))) == (taught, *plans)
    assert decode(encode(Path("here"))) == Path.cwd() / "here"


def test_missing_gpus_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_ranks.torch.cuda, "device_count", lambda: 2)
    two = DistributedConfig(backend="processes", learner_ranks=2)
    cuda = torch.device("cuda")
    assert [device.index for device in rank_devices(two, cuda)] == [0, 1]
    with pytest.raises(ConfigError, match="only 2 visible"):
        rank_devices(dataclasses.replace(two, learner_ranks=3), cuda)
    with pytest.raises(ConfigError, match="computes on a CPU"):
        rank_devices(dataclasses.replace(two, devices=(0, 1)), torch.device("cpu"))


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(plain)
def test_plain_values_round_trip(value: Any) -> None:
    assert decode(encode(value)) == value


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3)])
def test_tensors_round_trip(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    sent = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    (found, other) = decode(encode([sent, torch.ones(2)]))
    assert (found.dtype, found.shape) == (sent.dtype, sent.shape)
    assert torch.equal(found, sent)
    assert torch.equal(other, torch.ones(2))


def test_records_round_trip() -> None:
    call = ToolCall(text="<t>", tool="calculator", output="7 \N{SNOWMAN}", is_error=False)
    rollout = dataclasses.replace(strategies.scored_rollout(1.0).rollout, tool_calls=(call,))
    stats = UpdateStats(policy_version=3, moved=True, metrics={"loss/policy": 0.1})
    held = Footprint(weights=1, gradients=2, optimizer=3, activations=4, kv_cache=5)
    episode = dataclasses.replace(rollout, branches=(dataclasses.replace(rollout, fork="another history"),))
    sent = (rollout, episode, stats, held, Path("/a/b"))
    assert decode(encode(sent)) == sent


def test_samples_and_scores_round_trip() -> None:
    samples = strategies.random_samples(0)
    values = [sample.values for sample in samples]
    sent = ForwardScores(old=values, ref=values, values=values, next_values=torch.ones(len(samples)))
    found_samples, passes = decode(encode((samples, sent)))
    for ours, theirs in zip(samples, found_samples, strict=True):
        for field in dataclasses.fields(ours):
            one, other = getattr(ours, field.name), getattr(theirs, field.name)
            assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    assert all(torch.equal(one, other) for one, other in zip(values, passes.old, strict=True))


def test_devices_and_precisions_round_trip() -> None:
    runtime = Runtime(device=torch.device("cuda", 1), compute_dtype=torch.bfloat16, gradient_checkpointing=True)
    assert decode(encode((runtime, DistributedConfig()))) == (runtime, DistributedConfig())


def test_other_types_are_refused() -> None:
    with pytest.raises(TypeError, match="object cannot be sent between processes"):
        encode({"a": [object()]})
