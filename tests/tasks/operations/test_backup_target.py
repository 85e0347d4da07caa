"""Targets of backups: folders and fsspec's URLs, and manifests that were changed."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pytest

from rlcore.errors import ConfigError, StorageError
from rlcore.tasks.operations.backup_target import BackupFile, BackupTarget, Manifest

CONTENT = b"weights"
DIGEST = hashlib.sha256(CONTENT).hexdigest()
MANIFEST = Manifest(
    name="20260102T030405",
    versions={"state": 1},
    running=("tiny",),
    left_out={"work/a": "a run was changing it"},
    files=(
        BackupFile(path="a", sha256=DIGEST, bytes=7, modified=1),
        BackupFile(path="b", sha256=DIGEST, bytes=7, modified=1, link="a"),
    ),
)


@pytest.mark.parametrize("protocol", ["", "file://", "memory://"])
def test_contents_and_manifests_come_back_from_a_folder_and_from_a_url(protocol: str, tmp_path: Path) -> None:
    target = BackupTarget(f"memory://{uuid4().hex}" if protocol == "memory://" else f"{protocol}{tmp_path / 'target'}")
    assert (target.names(), target.contents()) == ((), {})
    source = tmp_path / "source"
    source.write_bytes(CONTENT)
    target.put(source, DIGEST)
    target.write(MANIFEST)
    target.write(replace(MANIFEST, name="20270102T030405"))
    assert target.names() == ("20260102T030405", "20270102T030405")
    assert target.contents() == {DIGEST: 7}
    assert target.read("20260102T030405") == MANIFEST
    target.get(DIGEST, tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == CONTENT
    target.remove(["20260102T030405"], [DIGEST])
    assert (target.names(), target.contents()) == (("20270102T030405",), {})


def test_a_new_folder_is_for_its_owner_alone(tmp_path: Path) -> None:
    BackupTarget(str(tmp_path / "target")).put(Path(__file__), DIGEST)
    assert (tmp_path / "target").stat().st_mode & 0o777 == 0o700


def test_a_hard_link_adds_no_bytes() -> None:
    assert MANIFEST.size == 7


@pytest.mark.parametrize(
    ("url", "error"),
    [
        ("nowhere://bucket/a", "the target of backups cannot be opened"),
        ("oci://bucket/a", "(?i)install ocifs"),  # a package that nothing here needs
        ("sftp://me:secret@host/a", "a password in the URL"),
    ],
)
def test_a_target_that_cannot_be_opened_is_refused(url: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error) as caught:
        BackupTarget(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"left_out": {}}, "changed after it was written"),
        ({"format": 2}, "has format 2, this rlcore knows 1"),
        ({"files": 3}, "damaged"),
        ({"files": [{"path": "../x", "sha256": DIGEST, "bytes": 1, "modified": 1}]}, "out of the state directory"),
    ],
)
def test_a_manifest_that_was_changed_is_refused_by_name(tmp_path: Path, change: dict[str, object], error: str) -> None:
    target = BackupTarget(str(tmp_path))
    target.write(MANIFEST)
    path = tmp_path / "manifests" / f"{MANIFEST.name}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(StorageError, match=error) as caught:
        target.read(MANIFEST.name)
    assert caught.value.where == str(path)


def test_a_missing_content_is_no_error_of_the_target_and_a_removed_source_is_the_callers(tmp_path: Path) -> None:
    target = BackupTarget(str(tmp_path / "target"))
    assert not target.get(DIGEST, tmp_path / "back")
    with pytest.raises(FileNotFoundError):
        target.put(tmp_path / "removed", DIGEST)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(CONTENT)
    with pytest.raises(StorageError, match="the target of backups cannot be used") as caught:
        BackupTarget(str(tmp_path / "file" / "below")).put(tmp_path / "file", DIGEST)
    assert "below" in caught.value.where
