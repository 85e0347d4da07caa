"""Restores: the same bytes in another place, and everything that is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from rlcore.errors import ConfigError, StorageError
from rlcore.flows.cli.app import main
from rlcore.tasks.operations.backup import Backup, back_up
from rlcore.tasks.operations.backup_target import BackupTarget
from rlcore.tasks.operations.restore import restore
from rlcore.tasks.store.audit_log import chain_errors, read_entries
from rlcore.tasks.store.settings import Home, configure_environment
from rlcore.tasks.store.state import UNFINISHED
from tests.s3_server import serve_s3
from tests.tasks.operations.conftest import add_result


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "target"


@pytest.fixture
def done(filled: Home, target: Path) -> Backup:
    return back_up(filled, str(target))


@pytest.fixture
def elsewhere(tmp_path: Path) -> Home:
    return Home(tmp_path / "elsewhere" / "home")


CHANGED = {"audit.jsonl", "mlflow.db", "prefect/prefect.db"}  # by the restore, or as SQLite copies


def content(home: Home) -> dict[str, bytes]:
    files = [path for path in home.root.rglob("*") if path.is_file()]
    found = {path.relative_to(home.root).as_posix(): path.read_bytes() for path in files}
    return {name: each for name, each in found.items() if name not in CHANGED}


def test_a_restored_home_has_the_same_files_links_and_audit_log(
    filled: Home, done: Backup, target: Path, elsewhere: Home
) -> None:
    restore(elsewhere, str(target))
    assert set(content(elsewhere)) == {"backups/last.json", *(each.path for each in done.manifest.files)} - CHANGED
    assert content(elsewhere).items() <= content(filled).items()
    (weights,) = [each for each in elsewhere.artifacts.rglob("weights.bin") if each.read_bytes() == b"first weights"]
    assert weights.samefile(elsewhere.mlartifacts / "tiny" / "model.bin")
    assert [each.action for each in read_entries(elsewhere)] == ["promote", "restore"]
    assert read_entries(elsewhere)[-1].details["seal"] == done.manifest.seal
    assert chain_errors(elsewhere) == ()
    assert elsewhere.root.stat().st_mode & 0o777 == 0o700
    configure_environment(elsewhere)
    known = set(done.manifest.files)
    new = {each.path for each in back_up(elsewhere, str(target)).manifest.files if each not in known}
    assert new <= CHANGED  # by path, digest and time


@pytest.fixture(params=["memory", "s3"])
def url(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "memory":
        yield f"memory://{uuid4().hex}"
        return
    for package in ("s3fs", "moto"):
        pytest.importorskip(package)
    with serve_s3() as server:
        yield server.new_bucket(monkeypatch)


def test_a_url_serves_as_a_folder_does(filled: Home, url: str, elsewhere: Home, tmp_path: Path) -> None:
    first, second = back_up(filled, url), back_up(filled, url, keep=1)
    assert (second.copied < first.copied, second.removed) == (True, (first.manifest.name,))
    restore(elsewhere, url)
    assert content(elsewhere).items() <= content(filled).items()
    spoiled = next(each for each in second.manifest.files if each.path.endswith("weights.bin"))
    (tmp_path / "other").write_bytes(b"x" * spoiled.bytes)
    BackupTarget(url).put(tmp_path / "other", spoiled.sha256)
    with pytest.raises(StorageError, match=f"{spoiled.path} is damaged"):
        restore(Home(tmp_path / "third"), url)
    if url.startswith("s3"):
        with pytest.raises(StorageError, match="the target of backups cannot be used"):
            back_up(filled, "s3://no-such-bucket/x")
    BackupTarget(url).remove([], [spoiled.sha256])
    with pytest.raises(StorageError, match=f"{spoiled.path} is missing"):
        restore(Home(tmp_path / "third"), url)


def test_the_newest_backup_is_restored_or_the_named_one(
    filled: Home, done: Backup, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_result(filled, "ppo", b"third weights")
    back_up(filled, str(target))
    for name, count in (("", 3), (done.manifest.name, 2)):
        home = Home(tmp_path / f"home {name}")
        monkeypatch.setenv("RLCORE_HOME", str(home.root))
        assert main(["restore", str(target), *(["--at", name] if name else [])]) == 0
        assert len(list(home.cache.glob("*/*.json"))) == count
    with pytest.raises(ConfigError, match=f"no backup 2020 here: its backups: {done.manifest.name}, "):
        restore(Home(tmp_path / "other"), str(target), "2020")
    with pytest.raises(ConfigError, match="it has no backup"):
        restore(Home(tmp_path / "other"), str(tmp_path / "nothing"))


def test_a_home_with_anything_in_it_is_refused(filled: Home, done: Backup, target: Path) -> None:
    before = content(filled)
    with pytest.raises(StorageError, match="into an empty state directory only"):
        restore(filled, str(target))
    assert content(filled) == before


@pytest.mark.parametrize("damage", ["removed", "changed", "cut"])
def test_a_damaged_backup_is_refused_naming_each_file_and_leaves_nothing(
    done: Backup, target: Path, elsewhere: Home, damage: str
) -> None:
    spoiled = [each for each in done.manifest.files if each.path.endswith("weights.bin")]
    for each in spoiled:
        path = target / "content" / each.sha256[:2] / each.sha256
        whole = path.read_bytes()
        path.write_bytes({"changed": b"x" * len(whole), "cut": whole[:-1], "removed": b""}[damage])
        if damage == "removed":
            path.unlink()
    with pytest.raises(StorageError, match="is damaged, and nothing was restored") as caught:
        restore(elsewhere, str(target))
    assert [each.path for each in spoiled if each.path not in str(caught.value)] == []
    assert not elsewhere.root.exists() or list(elsewhere.root.iterdir()) == []


def test_a_backup_of_a_newer_state_is_refused_before_anything_is_written(
    filled: Home, target: Path, elsewhere: Home
) -> None:
    note = filled.root / "versions.json"
    note.write_text(json.dumps(json.loads(note.read_text()) | {"records": 4}))
    back_up(filled, str(target))
    with pytest.raises(StorageError, match=r"written by a newer rlcore \(format 4, this one knows 3\)"):
        restore(elsewhere, str(target))
    assert not elsewhere.root.exists()


def test_a_home_whose_restore_was_killed_says_so_until_the_same_restore_has_ended(
    done: Backup, target: Path, elsewhere: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def die(*_: object, **__: object) -> None:
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr("rlcore.tasks.operations.restore.rewrite_artifact_paths", die)
        restore(elsewhere, str(target))
    with pytest.raises(StorageError, match="was not finished") as caught:
        configure_environment(elsewhere)
    assert "`rlcore restore` again" in caught.value.fix
    marker = elsewhere.root / UNFINISHED
    ours = marker.read_text()
    marker.write_text(json.dumps({"name": "20200101", "seal": ""}))
    with pytest.raises(StorageError, match="another backup, 20200101, was not finished"):
        restore(elsewhere, str(target))
    marker.write_text(ours)
    restore(elsewhere, str(target))
    assert not marker.exists()
    configure_environment(elsewhere)
