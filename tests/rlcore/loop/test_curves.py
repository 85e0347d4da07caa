"""Curves in TensorBoard, W&B (offline) and trackio: after SIGKILL and a resume each step is there once."""

from __future__ import annotations

import os
import signal
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlcore.errors import ConfigError
from rlcore.loop import LogRecorder
from rlcore.loop.curves import TOOLS, CurveRecorder
from tests.flows.conftest import environment
from tests.flows.warm import run_warm
from tests.waiting import until

METRICS = {"reward/mean": 0.5, "completion/length": 18.0}


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
def test_after_a_kill_no_step_is_lost_and_none_is_there_twice(name: str, tmp_path: Path) -> None:
    variables = environment(tmp_path / "home")
    killed = run_warm([name, str(tmp_path)], variables, tmp_path, call="tests.rlcore.loop.test_curves:write_and_die")
    assert killed.returncode == -9, killed.stderr
    with closing(TOOLS[name](tmp_path, project="mine", run="first")) as curves:
        for step in range(6, 11):
            if step > curves.resumed_at:
                curves.write(step, {"reward/mean": step / 10})
    assert steps_at_last(name, tmp_path, 10) == list(range(1, 11))


def test_a_line_of_the_journal_that_a_kill_has_cut_is_no_step(tmp_path: Path) -> None:
    (tmp_path / "mine-first.jsonl").write_text('{"folder": "x"}\n{"step": 1, "metrics": {"a": 1.0}}\n{"step": 2, "met')
    with closing(TOOLS["wandb"](tmp_path, project="mine", run="first")) as curves:
        assert curves.resumed_at == 1
    assert steps_at_last("wandb", tmp_path, 1) == [1]
    with closing(TOOLS["wandb"](tmp_path, project="mine", run="first")) as curves:
        assert curves.resumed_at == 1
    assert steps_at_last("wandb", tmp_path, 1) == [1]


def test_a_recorder_passes_everything_on_and_drops_steps_that_the_tool_has(caplog: pytest.LogCaptureFixture) -> None:
    written, flushed = [], []
    keep = {"write": lambda step, _: written.append(step), "flush": lambda: flushed.append(1), "close": lambda: None}
    curves = SimpleNamespace(resumed_at=2, **keep)
    recorder = CurveRecorder(curves, LogRecorder(4))
    with caplog.at_level("INFO", logger="rlcore"):
        for iteration in (2, 3):
            recorder.metrics(iteration, METRICS)
        recorder.log("a sentence")
        recorder.flush()
    assert (written, flushed) == ([3], [1])
    assert [record.getMessage()[:13] for record in caplog.records] == ["iteration 2/4", "iteration 3/4", "a sentence"]


def test_a_tool_that_is_not_installed_names_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"(?s)wandb is not installed.*pip install wandb"):
        TOOLS["wandb"](tmp_path)
