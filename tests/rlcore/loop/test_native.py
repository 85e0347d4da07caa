"""Runs of the library: checks before a run, accepted forms of input, log lines and curves of other tools."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import signal
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import rlcore
from rlcore.checks.health import HealthFinding
from rlcore.errors import ConfigError
from rlcore.loop import Components, HealthStop, HeldOut, LogRecorder, summary_line, train
from rlcore.loop.curves import TOOLS, CurveRecorder
from rlcore.loop.native import native_components
from rlcore.models.importing import import_model
from rlcore.rewards.user_function import function_reward
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import Rollout
from tests import strategies
from tests.flows.conftest import environment
from tests.flows.warm import run_warm
from tests.rlcore.loop.conftest import SHAPE, Tape, prompts_of, right_answers
from tests.waiting import until


def components(
    start: Path | str, folder: Path | str, *, prompts: Any = None, reward: Any = None, **settings: Any
) -> Components:
    prompts = prompts_of(start) if prompts is None else prompts
    rl = strategies.rl_config(**settings)
    return native_components(start, rl, prompts=prompts, reward=reward or right_answers, folder=folder)


def sampling(**settings: Any) -> rlcore.SamplingConfig:
    return rlcore.SamplingConfig(**{"max_new_tokens": 6} | settings)


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "kind": ({"num_iterations": 2.5}, "num_iterations = 2.5: must be an integer, not a float"),
    "group": ({"group_size": 1}, "group_size = 1: grpo compares answers to one prompt, so one carries no signal"),
    "algorithm": ({"algorithm": "ggrpo"}, "algorithm: unknown algorithm 'ggrpo'"),
    "length": ({"sampling": sampling(max_new_tokens=500)}, "in all, the model reads 128"),
    "no prompts": ({"prompts": []}, "prompts: there are none; make some with rlcore.chat_prompts"),
    "texts": ({"prompts": ["3 + 4"]}, "prompts: '3 + 4' is str, not rlcore.Prompt; make prompts with"),
    "lora": (
        {"update": rlcore.UpdateConfig(lora=rlcore.config.LoraConfig(rank=4))},
        "native_components supports neither LoRA",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_is_refused_by_name(name: str, start: Path, tmp_path: Path) -> None:
    settings, expected = MISTAKES[name]
    with pytest.raises(ConfigError, match=re.escape(expected)):
        components(start, tmp_path / "run", **settings)


def test_all_invalid_values_are_named(start: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        components(start, tmp_path / "run", learning_rate=-1.0, group_size=0, sampling=sampling(temperature=-1.0))
    keys = ("group_size = 0", "learning_rate = -1.0: must be greater than 0.0", "sampling.temperature = -1.0")
    assert "has 3 errors" in str(caught.value) and all(key in str(caught.value) for key in keys)


def test_plain_function_is_a_reward(start: Path, tmp_path: Path) -> None:
    def length(rollouts: Sequence[Rollout]) -> list[float]:
        return [float(len(rollout.completion_ids)) for rollout in rollouts]

    plain, wrapped = (
        train(components(start, tmp_path / name, reward=reward, num_iterations=1), Tape()).history[0]["reward/mean"]
        for name, reward in (("plain", length), ("wrapped", function_reward(length)))
    )
    assert plain == wrapped > 0.0


def test_unwrapped_verifier_is_refused(start: Path, tmp_path: Path) -> None:
    made = components(start, tmp_path / "run")
    unwrapped: Any = right_answers
    held_out = HeldOut(prompts=made.prompts[:1], verifier=unwrapped)
    made = dataclasses.replace(made, prompts=made.prompts[1:])
    with pytest.raises(ConfigError, match=r"is a function, not the result of function_reward") as caught:
        train(dataclasses.replace(made, held_out=held_out), Tape())
    assert "rlcore.function_reward(function)" in str(caught.value)


def test_strings_are_paths(start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    import_model(rlcore.ModelConfig(source="scratch", shape=SHAPE), "model", seed=0)
    made = components("model", "run", num_iterations=1)
    train(made, Tape())
    made.learner.save_model("model", "trained")
    assert ChatTokenizer.load("trained").eos_ids == ChatTokenizer.load(start).eos_ids
    policy = rlcore.load_policy("trained", device=torch.device("cpu"), dtype=torch.float32)
    rlcore.save_model(policy, "trained", "again")
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == Path("trained/model.safetensors").read_bytes()


METRICS = {"reward/mean": 0.5123, "completion/length": 18.04}
FINDING = HealthFinding(
    rule="kl", metric="kl/ref", level="stop", since=5, value=0.75, limit=0.5, fix="lower the learning rate"
)
STOP = HealthStop(finding=FINDING, iteration=9, restored_iteration=4)


def test_summary_line() -> None:
    assert summary_line(3, 10, METRICS) == "iteration 3/10 reward=0.512 length=18.0"
    more = METRICS | {"eval/accuracy": 0.4, "kl/ref": 0.01, "loss/policy": 7.0}
    assert summary_line(3, 10, more) == "iteration 3/10 reward=0.512 length=18.0 kl=0.0100 eval_accuracy=0.400"


def test_log_recorder(caplog: pytest.LogCaptureFixture) -> None:
    recorder = LogRecorder(2)
    with caplog.at_level(logging.INFO, logger="rlcore"):
        recorder.log("engine and learner agree, 100 %")
        recorder.metrics(1, METRICS)
        recorder.flush()
        recorder.stopped(STOP)
    levels = [record.levelno for record in caplog.records]
    assert levels == [logging.INFO, logging.INFO, logging.WARNING]
    notes = [record.getMessage() for record in caplog.records]
    assert notes[:2] == ["engine and learner agree, 100 %", "iteration 1/2 reward=0.512 length=18.0"]


def test_text_of_health_stop() -> None:
    assert str(STOP) == (
        "stopped after iteration 9: kl: kl/ref=0.75 limit=0.5 since iteration 5; the result is iteration 4."
        " lower the learning rate"
    )


CURVES_METRICS = {"reward/mean": 0.5, "completion/length": 18.0}


def tensorboard_steps(folder: Path) -> list[int]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return [event.step for event in EventAccumulator(str(folder / "mine/first")).Reload().Scalars("reward/mean")]


def trackio_steps(folder: Path) -> list[int]:
    import trackio

    return [row["step"] for row in trackio.SQLiteStorage.get_logs("mine", "first") if "reward/mean" in row]


def records(file: Path) -> Iterator[bytes]:
    """Records of W&B's file, which is a log of LevelDB: blocks of 32 KiB, and parts with checksum, length and type."""
    content, place, found = file.read_bytes(), 7, b""
    while place + 7 <= len(content):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        _, length, kind = struct.unpack("<IHB", content[place : place + 7])
        found = (b"" if kind in (1, 2) else found) + content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield found


def wandb_steps(folder: Path) -> list[int]:
    from wandb.proto import wandb_internal_pb2

    found = []
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):  # what wandb sync reads
        for content in records(file):
            record: Any = wandb_internal_pb2.Record()
            record.ParseFromString(content)
            if record.HasField("history"):
                found.append(record.history.step.num)
    return found


STEPS: dict[str, Callable[[Path], list[int]]] = {
    "tensorboard": tensorboard_steps,
    "wandb": wandb_steps,
    "trackio": trackio_steps,
}


def steps_at_last(name: str, folder: Path, last: int) -> list[int]:
    """Steps of a tool's files. W&B's service may write the last block shortly after a run has ended."""
    return sorted(until(lambda: found if last in (found := STEPS[name](folder)) else [], f"step {last}"))


@pytest.fixture(autouse=True)
def _local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SERVICE", "")  # W&B sets it, for processes that are started later; no test is one
    monkeypatch.delenv("WANDB_SERVICE")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))


def write_and_die(arguments: list[str]) -> int:
    """Write seven steps, the first five for good, and die: for the warm process."""
    curves = TOOLS[arguments[0]](Path(arguments[1]), project="mine", run="first")
    for step in range(1, 8):
        curves.write(step, {"reward/mean": step / 10})
        if step == 5:
            curves.flush()  # a checkpoint: the next process begins at 6
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


@pytest.mark.parametrize("name", TOOLS)
def test_curves_after_kill_have_every_step_once(name: str, tmp_path: Path) -> None:
    variables = environment(tmp_path / "home")
    killed = run_warm([name, str(tmp_path)], variables, tmp_path, call="tests.rlcore.loop.test_native:write_and_die")
    assert killed.returncode == -9, killed.stderr
    with closing(TOOLS[name](tmp_path, project="mine", run="first")) as curves:
        for step in range(6, 11):
            if step > curves.resumed_at:
                curves.write(step, {"reward/mean": step / 10})
    assert steps_at_last(name, tmp_path, 10) == list(range(1, 11))


def test_truncated_journal_line_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "mine-first.jsonl").write_text('{"folder": "x"}\n{"step": 1, "metrics": {"a": 1.0}}\n{"step": 2, "met')
    with closing(TOOLS["wandb"](tmp_path, project="mine", run="first")) as curves:
        assert curves.resumed_at == 1
    assert steps_at_last("wandb", tmp_path, 1) == [1]
    with closing(TOOLS["wandb"](tmp_path, project="mine", run="first")) as curves:
        assert curves.resumed_at == 1
    assert steps_at_last("wandb", tmp_path, 1) == [1]


def test_curve_recorder_drops_known_steps(caplog: pytest.LogCaptureFixture) -> None:
    written, flushed = [], []
    keep = {"write": lambda step, _: written.append(step), "flush": lambda: flushed.append(1), "close": lambda: None}
    curves = SimpleNamespace(resumed_at=2, **keep)
    recorder = CurveRecorder(curves, LogRecorder(4))
    with caplog.at_level("INFO", logger="rlcore"):
        for iteration in (2, 3):
            recorder.metrics(iteration, CURVES_METRICS)
        recorder.log("a sentence")
        recorder.flush()
    assert (written, flushed) == ([3], [1])
    assert [record.getMessage()[:13] for record in caplog.records] == ["iteration 2/4", "iteration 3/4", "a sentence"]


def test_missing_tool_names_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"(?s)wandb is not installed.*pip install wandb"):
        TOOLS["wandb"](tmp_path)
