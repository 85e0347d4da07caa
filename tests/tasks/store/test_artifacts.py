from __future__ import annotations

import dataclasses
import json
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.errors import StorageError
from rlcore.tasks.store.artifacts import MANIFEST, ArtifactRef, ArtifactStore

# sha256("hello") is 2cf24dba...; the folder's digest is the SHA-256 of the text
#   [["a.txt", "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"]]
HELLO_FOLDER = "5748de0959e6520c58edb35b1d2ebf2b1026bb7f924ec58d635c45c1eb2a805d"

FILE_NAMES = st.text(alphabet="abc", min_size=1, max_size=3)
CONTENTS = st.dictionaries(FILE_NAMES, st.binary(max_size=20), min_size=1, max_size=4)


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def commit(root: Path, files: dict[str, bytes], *, name: str = "new") -> ArtifactRef:
    return ArtifactStore(root).commit(write(root / name, files), kind="thing", rows=3, contract="c/v1", stage_key="k")


def test_a_committed_folder_is_found_under_the_digest_of_its_content(tmp_path: Path) -> None:
    ref = commit(tmp_path, {"a.txt": b"hello"})
    assert ref == ArtifactRef(
        kind="thing",
        uri=f"artifacts/thing/{HELLO_FOLDER}",
        sha256=HELLO_FOLDER,
        bytes=5,
        rows=3,
        contract="c/v1",
        stage_key="k",
    )
    assert (ArtifactStore(tmp_path).path(ref) / "a.txt").read_bytes() == b"hello"
    assert not (tmp_path / "new").exists()
    assert ArtifactStore(tmp_path).errors(ref) == ()


def test_the_manifest_names_every_file_with_its_size_and_digest(tmp_path: Path) -> None:
    ref = commit(tmp_path, {"b/c.bin": b"12345", "a.txt": b"hello"})
    manifest = json.loads((ArtifactStore(tmp_path).path(ref) / MANIFEST).read_text())
    assert [(entry["path"], entry["bytes"]) for entry in manifest["files"]] == [("a.txt", 5), ("b/c.bin", 5)]
    assert manifest["sha256"] == ref.sha256


@settings(max_examples=25, deadline=None)
@given(files=CONTENTS, data=st.data())
def test_the_digest_is_that_of_names_and_bytes_whatever_the_order(files: dict[str, bytes], data: st.DataObject) -> None:
    shuffled = dict(data.draw(st.permutations(list(files.items()))))
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
        assert commit(Path(one), files).sha256 == commit(Path(two), shuffled).sha256


@settings(max_examples=25, deadline=None)
@given(files=CONTENTS, data=st.data())
def test_any_other_content_has_another_digest(files: dict[str, bytes], data: st.DataObject) -> None:
    other = data.draw(CONTENTS.filter(lambda drawn: drawn != files))
    with tempfile.TemporaryDirectory() as root:
        assert commit(Path(root), files).sha256 != commit(Path(root), other).sha256


def test_the_same_content_twice_is_one_artifact(tmp_path: Path) -> None:
    first, second = commit(tmp_path, {"a": b"1"}), commit(tmp_path, {"a": b"1"}, name="again")
    assert first == second
    assert not (tmp_path / "again").exists()
    assert len(list((tmp_path / "artifacts" / "thing").iterdir())) == 1


def test_missing_damaged_and_extra_files_are_noticed(tmp_path: Path) -> None:
    ref = commit(tmp_path, {"a": b"1", "b": b"2"})
    store = ArtifactStore(tmp_path)
    folder = store.path(ref)
    (folder / "a").write_bytes(b"x")
    (folder / "b").unlink()
    (folder / "z").write_bytes(b"")
    assert store.errors(ref) == ("b is missing", "z does not belong to it", "a is damaged")
    (folder / MANIFEST).write_text((folder / MANIFEST).read_text()[:20])
    assert store.errors(ref)[0].startswith("the manifest is damaged")
    shutil.rmtree(folder)
    assert store.errors(ref) == ("the artifact is missing",)
    with pytest.raises(StorageError, match="is missing"):
        store.path(ref)


def test_a_manifest_that_was_rewritten_to_fit_damaged_files_is_noticed(tmp_path: Path) -> None:
    ref = commit(tmp_path, {"a": b"1"})
    other = commit(tmp_path, {"a": b"2"}, name="other")
    store = ArtifactStore(tmp_path)
    shutil.copytree(store.path(other), store.path(ref), dirs_exist_ok=True)
    assert store.errors(ref) == ("the manifest is not that of the reference",)


def test_committing_again_repairs_a_damaged_artifact(tmp_path: Path) -> None:
    ref = commit(tmp_path, {"a": b"1"})
    store = ArtifactStore(tmp_path)
    (store.path(ref) / "a").write_bytes(b"x")
    assert commit(tmp_path, {"a": b"1"}, name="again") == ref
    assert store.errors(ref) == ()
    assert [path.name for path in (tmp_path / "artifacts" / "thing").iterdir()] == [ref.sha256]


def test_the_home_can_be_moved(tmp_path: Path) -> None:
    ref = commit(tmp_path / "old", {"a": b"1"})
    (tmp_path / "old").rename(tmp_path / "new")
    assert ArtifactStore(tmp_path / "new").errors(ref) == ()


def test_an_empty_folder_and_a_link_which_points_out_of_the_artifact_are_refused(tmp_path: Path) -> None:
    folder, store = tmp_path / "new", ArtifactStore(tmp_path)
    folder.mkdir()
    with pytest.raises(StorageError, match="wrote no file"):
        store.commit(folder, kind="thing")
    write(folder, {"a": b"1"})
    (folder / "link").symlink_to("/etc/hostname")
    with pytest.raises(StorageError, match="link or a special file"):
        store.commit(folder, kind="thing")


def test_a_reference_goes_through_json_and_back(tmp_path: Path) -> None:
    ref = dataclasses.replace(commit(tmp_path, {"a": b"1"}), mlflow_run_id="r")
    assert ArtifactRef.from_json(json.loads(json.dumps(ref.to_json()))) == ref


@pytest.mark.parametrize("change", [{"bytes": "5"}, {"rows": None}, {"colour": "red"}, {"sha256": 7}])
def test_a_reference_of_the_wrong_shape_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    document = commit(tmp_path, {"a": b"1"}).to_json() | change
    with pytest.raises(StorageError, match="not a reference"):
        ArtifactRef.from_json(document)
