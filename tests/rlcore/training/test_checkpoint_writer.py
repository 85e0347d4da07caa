"""Checkpoints written in the background: of the moment at which they were asked for, whole, and with their errors."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from rlcore.errors import StorageError
from rlcore.training import checkpoint_writer
from rlcore.training.checkpoint import capture_state, is_intact, load_newest, write_checkpoint
from rlcore.training.checkpoint_writer import CheckpointWriter
from tests import learners, strategies
from tests.learners import weights_of

IDENTITY = {"config": "c1"}
make_learner = partial(learners.make_learner, dtype=torch.float32)


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A disk that writes nothing before the event is set."""
    may_write = threading.Event()

    def write(*arguments: Any, **settings: Any) -> Path:
        may_write.wait()
        return write_checkpoint(*arguments, **settings)

    monkeypatch.setattr(checkpoint_writer, "write_checkpoint", write)
    yield may_write
    may_write.set()


def test_steps_of_the_learner_during_the_write_are_not_in_the_checkpoint(
    slow_disk: threading.Event, tmp_path: Path
) -> None:
    learner, history = make_learner("ppo"), [1.0]
    learner.update(strategies.random_samples(0), seed=0)
    saved = weights_of(learner.policy), weights_of(learner.critic)
    with closing(CheckpointWriter()) as writer:
        writer.save(tmp_path, 1, learner, run_state={"identity": IDENTITY, "history": history})
        learner.update(strategies.random_samples(1), seed=1)
        history.append(2.0)
        assert not (tmp_path / "step-000001").exists()
        slow_disk.set()
    restored = make_learner("ppo")
    assert load_newest(tmp_path, restored, identity=IDENTITY) == {"identity": IDENTITY, "history": [1.0]}
    assert torch.equal(weights_of(restored.policy), saved[0])
    assert torch.equal(weights_of(restored.critic), saved[1])
    assert restored.policy_version == 1
    restored.update(strategies.random_samples(1), seed=1)  # with the moments of the moment
    assert torch.equal(weights_of(restored.policy), weights_of(learner.policy))


def test_the_next_checkpoint_waits_for_the_one_before(slow_disk: threading.Event, tmp_path: Path) -> None:
    learner = make_learner()
    with closing(CheckpointWriter()) as writer:
        writer.save(tmp_path, 1, learner, run_state={"identity": IDENTITY})
        threading.Timer(0.1, slow_disk.set).start()
        writer.save(tmp_path, 2, learner, run_state={"identity": IDENTITY})
        assert is_intact(tmp_path / "step-000001")
    assert is_intact(tmp_path / "step-000002")


def test_where_a_copy_does_not_fit_the_checkpoint_is_there_when_save_returns(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    learner = make_learner()
    for number, free in enumerate((0, None), start=1):
        monkeypatch.setattr(checkpoint_writer, "free_bytes", lambda _, free=free: free)
        writer = CheckpointWriter()
        writer.save(tmp_path, number, learner, run_state={"identity": IDENTITY})
        assert is_intact(tmp_path / f"step-{number:06d}")
        assert not writer._thread._threads  # nothing was started


@pytest.mark.parametrize("asked", ["save", "wait", "close"])
def test_an_error_of_the_disk_is_raised_by_whoever_asks_next(asked: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    folder = tmp_path / "file" / "folder"
    writer = CheckpointWriter()
    writer.save(folder, 1, make_learner(), run_state={"identity": IDENTITY})
    ask = partial(writer.save, folder, 2, make_learner(), run_state={}) if asked == "save" else getattr(writer, asked)
    with pytest.raises(StorageError, match="step 1 could not be written"):
        ask()
    writer.close()  # told once


def test_memory_of_the_copy_is_what_the_checkpoint_has_on_the_disk(tmp_path: Path) -> None:
    learner = make_learner("ppo")
    learner.update(strategies.random_samples(0), seed=0)
    snapshot = capture_state(learner, run_state={})
    size = sum(path.stat().st_size for path in write_checkpoint(tmp_path, 1, snapshot).glob("*.safetensors"))
    numbers = sum(p.numel() for model in (learner.policy, learner.critic) if model for p in model.parameters())
    assert snapshot.copied().num_bytes == snapshot.num_bytes == pytest.approx(12 * numbers, rel=0.01)
    assert snapshot.num_bytes <= size < 1.2 * snapshot.num_bytes
