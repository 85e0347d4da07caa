"""A stage whose library or files are missing is named before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlcore.extras import install_command
from rlcore.flows.presets import open_preset
from rlcore.tasks.kinds.benchmark import kind


def test_a_missing_harness_and_a_missing_task_are_named_with_their_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    config = open_preset("skills", ('stages.skills.tasks=["sum_choice", "gone"]',))
    monkeypatch.setattr(kind, "find_spec", lambda name: None)
    installed, task = kind.errors("stages.skills", config.stages["skills"])
    assert installed == f"stages.skills: the evaluation harness is not installed: {install_command('benchmarks')}"
    assert task.startswith("stages.skills.tasks: there is no file ")
    assert Path(task.rpartition(" ")[2]).name == "gone.yaml"


def test_the_committed_tasks_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kind, "find_spec", lambda name: object())
    assert list(kind.errors("stages.skills", open_preset("skills").stages["skills"])) == []
