"""Export of a registered model: its files, its card, and what is left where it ends."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from rlcore.errors import ModelError, StorageError
from rlcore.models import saving
from rlcore.tasks.serving.export import export_model, open_registered
from rlcore.tasks.store.settings import Home, configure_environment, find_home
from tests.chat_models import our_answers
from tests.flows.conftest import environment
from tests.flows.warm import run_warm
from tests.registered import register_toy


def test_a_registered_model_is_exported_with_its_card(tracked_home: Home, tmp_path: Path) -> None:
    ref = register_toy(tracked_home)
    folder = export_model(tracked_home, "toy-sft/1", tmp_path / "out")
    assert our_answers(folder) == our_answers(tracked_home.root / ref.uri / "model")
    assert AutoTokenizer.from_pretrained(folder).chat_template
    card = (folder / "README.md").read_text()
    assert card.startswith("---\n") and "\nlicense: " in card.partition("\n---\n")[0]
    assert "No decision yet" in card
    assert "`my\\|sums.jsonl` | 9 | 3" in card
    assert "sft/loss" in card


@pytest.mark.parametrize("damage", ["gone", "changed"])
def test_missing_files_come_from_the_registry(tracked_home: Home, tmp_path: Path, damage: str) -> None:
    ref = register_toy(tracked_home)
    expected = our_answers(tracked_home.root / ref.uri / "model")
    weights = tracked_home.root / ref.uri / "model" / "model.safetensors"
    weights.unlink()  # the bytes stay, under the name that the registry has for them
    if damage == "changed":
        weights.write_bytes(b"")
    with open_registered(tracked_home, "toy-sft/1") as registered:
        assert our_answers(registered.folder) == expected
    assert not registered.folder.exists()


def export_and_die(arguments: Sequence[str]) -> int:
    """Export a model and die when its files are written to the disk: for the warm process."""
    saving.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
    configure_environment(find_home())
    export_model(find_home(), "toy-sft/1", Path(arguments[0]))
    return 0


@pytest.mark.slow  # the process of the kill imports for seconds; what a kill leaves is in store/test_storage.py
def test_the_next_command_removes_what_a_killed_export_left(tracked_home: Home, tmp_path: Path) -> None:
    ref = register_toy(tracked_home)
    (tracked_home.root / ref.uri / "model" / "model.safetensors").unlink()  # so that files come from the registry
    call = f"{__name__}:export_and_die"
    done = run_warm([str(tmp_path / "out")], environment(tracked_home.root), tmp_path, call=call)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert [path.name for path in tmp_path.glob("*out*")] != []
    assert list(tracked_home.work.glob(".scratch-*")) != []
    configure_environment(tracked_home)
    assert list(tmp_path.glob("*out*")) == []
    assert list(tracked_home.work.iterdir()) == []


def test_a_copied_home_exports_its_own_model(
    tracked_home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = register_toy(tracked_home)
    expected = our_answers(tracked_home.root / ref.uri / "model")
    copy = Home(tmp_path / "elsewhere" / "home")
    shutil.copytree(tracked_home.root, copy.root)
    shutil.rmtree(copy.artifacts / "checkpoint", ignore_errors=True)
    shutil.rmtree(copy.root / ref.uri, ignore_errors=True)
    shutil.rmtree(tracked_home.mlartifacts)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", copy.tracking_uri)
    monkeypatch.setenv("RLCORE_HOME", str(copy.root))
    assert our_answers(export_model(copy, "toy-sft/1", tmp_path / "out")) == expected


def test_what_cannot_be_exported_is_refused_before_anything_is_written(tracked_home: Home, tmp_path: Path) -> None:
    register_toy(tracked_home)
    out = tmp_path / "out"
    with pytest.raises(ModelError, match="no registered model 'toy-sft@champion'"):
        export_model(tracked_home, "toy-sft@champion", out)
    assert not out.exists()
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    with pytest.raises(StorageError, match="not empty"):
        export_model(tracked_home, "toy-sft/1", out)
    assert [path.name for path in out.iterdir()] == ["notes.txt"]


def test_a_model_name_with_a_dot_works_from_registration_to_export(tracked_home: Home, tmp_path: Path) -> None:
    register_toy(tracked_home, "toy-v1.2")
    export_model(tracked_home, "models:/toy-v1.2-sft/1", tmp_path / "out")
    assert "`toy-v1.2-sft`" in (tmp_path / "out" / "README.md").read_text()
