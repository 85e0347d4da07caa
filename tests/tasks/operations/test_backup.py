"""Backups: their content, what they copy the second time, active runs, and old ones."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rlcore.errors import ConfigError, StorageError
from rlcore.flows.cli.app import main
from rlcore.tasks.operations import backup
from rlcore.tasks.operations.backup import Backup, back_up
from rlcore.tasks.operations.backup_target import BackupTarget
from rlcore.tasks.pipeline.leases import hold_lease
from rlcore.tasks.store.audit_log import read_entries
from rlcore.tasks.store.locks import file_lock
from rlcore.tasks.store.settings import Home
from tests.tasks.operations.conftest import add_result


@pytest.fixture
def target(tmp_path: Path) -> str:
    return str(tmp_path / "target")


def paths(done: Backup) -> set[str]:
    return {each.path for each in done.manifest.files}


def test_a_backup_has_everything_but_secrets_locks_and_partial_files(filled: Home, target: str) -> None:
    found = paths(back_up(filled, target))
    assert {"mlflow.db", "audit.jsonl", "versions.json", "cache/sft/sft.json", "work/key/inputs.json"} <= found
    assert {"work/key/checkpoints/history.jsonl", "checkpoints/tiny/grpo/inputs.json"} <= found
    assert len([path for path in found if path.startswith("artifacts/policy/")]) == 6
    assert [path for path in found if "lock" in path or "uploading" in path or "profiles" in path] == []


def test_the_second_backup_reads_and_copies_only_what_is_new(
    filled: Home, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = back_up(filled, target)
    add_result(filled, "ppo", b"third weights")
    hashed = list[Path]()
    digest = backup.file_sha256
    monkeypatch.setattr(backup, "file_sha256", lambda path: hashed.append(path) or digest(path))
    second = back_up(filled, target)
    assert {path.name for path in hashed} & {"weights.bin", "model.bin"} == {"weights.bin"}
    assert paths(first) < paths(second)
    assert 13 <= second.copied < first.copied
    assert BackupTarget(target).names() == (first.manifest.name, second.manifest.name)


def test_a_hard_link_is_noted(filled: Home, target: str) -> None:
    (linked,) = [each for each in back_up(filled, target).manifest.files if each.link]
    assert linked.path == "mlartifacts/tiny/model.bin"
    assert linked.link.endswith("model/weights.bin")


def test_a_database_is_copied_with_what_is_still_in_its_log(filled: Home, target: str, tmp_path: Path) -> None:
    with closing(sqlite3.connect(filled.root / "mlflow.db")) as database:
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("INSERT INTO experiments (name, lifecycle_stage) VALUES ('kept', 'active')")
        database.commit()
        (entry,) = [each for each in back_up(filled, target).manifest.files if each.path == "mlflow.db"]
    BackupTarget(target).get(entry.sha256, tmp_path / "copy.db")
    with closing(sqlite3.connect(tmp_path / "copy.db")) as database:
        assert database.execute("SELECT count(*) FROM experiments WHERE name = 'kept'").fetchone() == (1,)


def test_an_active_run_is_named_and_a_folder_that_it_changes_is_left_out(
    filled: Home, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    history, put = filled.work / "key" / "checkpoints" / "history.jsonl", BackupTarget.put

    def write_meanwhile(self: BackupTarget, source: Path, sha256: str) -> None:
        put(self, source, sha256)
        with history.open("a") as file:
            file.write("{}\n")

    monkeypatch.setattr(BackupTarget, "put", write_meanwhile)
    with hold_lease(filled, experiment="tiny"):
        done = back_up(filled, target)
    assert done.manifest.running == ("tiny",)
    assert done.manifest.left_out == {"work/key": "a run was changing it"}
    assert [path for path in paths(done) if path.startswith("work/")] == []
    assert "active meanwhile: tiny" in backup.describe(done)


def test_a_damaged_artifact_is_named_and_an_earlier_backup_mends_it(filled: Home, target: str, tmp_path: Path) -> None:
    (weights,) = [path for path in filled.artifacts.rglob("weights.bin") if path.read_bytes() == b"second weights"]
    weights.write_bytes(b"spoiled weight")
    path = weights.relative_to(filled.root).as_posix()
    assert back_up(filled, str(tmp_path / "other")).manifest.left_out == {
        path: "damaged: not the file that its artifact had"
    }
    weights.write_bytes(b"second weights")
    whole = back_up(filled, target)
    weights.write_bytes(b"spoiled weight")
    mended = back_up(filled, target)
    assert mended.manifest.left_out == {}
    assert {e.sha256 for e in whole.manifest.files if e.path == path} == {
        e.sha256 for e in mended.manifest.files if e.path == path
    }


def test_old_backups_go_with_the_contents_that_only_they_have(filled: Home, target: str) -> None:
    first = back_up(filled, target)
    (filled.root / "audit.jsonl").write_text("")
    second = back_up(filled, target, keep=1)
    assert second.removed == (first.manifest.name,)
    assert BackupTarget(target).names() == (second.manifest.name,)
    assert BackupTarget(target).contents().keys() == {each.sha256 for each in second.manifest.files}


def test_a_damaged_manifest_keeps_nobody_from_the_next_backup_and_nothing_is_removed(filled: Home, target: str) -> None:
    first = back_up(filled, target)
    path = Path(target) / "manifests" / f"{first.manifest.name}.json"
    path.write_bytes(path.read_bytes()[:-9])
    second = back_up(filled, target)
    assert second.manifest.left_out == {}
    before = BackupTarget(target).contents()
    with pytest.raises(StorageError, match="the manifest is damaged"):
        back_up(filled, target, keep=3)
    assert BackupTarget(target).contents().keys() >= before.keys()
    assert len(BackupTarget(target).names()) == 3
    assert read_entries(filled)[-1].details["name"] == BackupTarget(target).names()[-1]


def test_a_backup_is_in_the_audit_log_and_its_time_in_the_home(
    filled: Home, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["backup", target, "--keep", "3"]) == 0
    (name,) = BackupTarget(target).names()
    assert f"backup {name} in {target}: " in capsys.readouterr().out
    entry = read_entries(filled)[-1]
    assert (entry.action, entry.subject, entry.details["name"]) == ("backup", "home", name)
    last: dict[str, Any] = json.loads((filled.root / "backups" / "last.json").read_text())
    assert (last["target"], last["bytes"]) == (target, entry.details["bytes"])
    assert last["time"] <= entry.time


def test_a_target_in_the_home_and_a_second_backup_at_once_are_refused(filled: Home, target: str) -> None:
    with pytest.raises(ConfigError, match="the target is in the state directory"):
        back_up(filled, str(filled.root / "backups"))
    with file_lock(filled.root / "backup.lock"), pytest.raises(StorageError, match="another backup is active"):
        back_up(filled, target)


def test_databases_of_a_server_elsewhere_are_named(filled: Home, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking.example")
    assert back_up(filled, target).manifest.left_out == {
        "dumps/mlflow.dump": "the database of http://tracking.example is backed up where it runs"
    }
