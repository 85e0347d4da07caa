"""Artifacts and cache records at home and in a shared store: found by their digests, and refused when damaged."""

from __future__ import annotations

import dataclasses
import json
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.errors import StorageError
from rlcore.tasks.store.artifacts import MANIFEST, ArtifactRef, ArtifactStore
from rlcore.tasks.store.cache import Record, StageCache
from rlcore.tasks.store.settings import Home
from rlcore.tasks.store.shared import RemoteError, SharedStore
from tests.s3_server import S3, serve_s3

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


@settings(max_examples=25, deadline=None)
@given(files=CONTENTS, data=st.data())
def test_the_digest_is_that_of_names_and_bytes_whatever_the_order(files: dict[str, bytes], data: st.DataObject) -> None:
    shuffled = dict(data.draw(st.permutations(list(files.items()))))
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
        assert commit(Path(one), files).sha256 == commit(Path(two), shuffled).sha256


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


def test_an_empty_folder_a_link_that_points_out_of_it_and_a_half_written_file_are_refused(tmp_path: Path) -> None:
    folder, store = tmp_path / "new", ArtifactStore(tmp_path)
    folder.mkdir()
    with pytest.raises(StorageError, match="wrote no file"):
        store.commit(folder, kind="thing")
    write(folder, {"a": b"1"})
    (folder / "link").symlink_to("/etc/hostname")
    with pytest.raises(StorageError, match="link or a special file"):
        store.commit(folder, kind="thing")
    (folder / "link").unlink()
    (folder / ".a.0123abcd.tmp").write_text("1")
    with pytest.raises(StorageError, match="never finished"):
        store.commit(folder, kind="thing")


@pytest.mark.parametrize("change", [{"bytes": "5"}, {"rows": None}, {"colour": "red"}, {"sha256": 7}])
def test_a_reference_of_the_wrong_shape_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    document = commit(tmp_path, {"a": b"1"}).to_json() | change
    with pytest.raises(StorageError, match="not a reference"):
        ArtifactRef.from_json(document)


RECORD = Record(
    key="abc",
    ref=ArtifactRef(kind="checkpoint", uri="artifacts/sft/abc", sha256="0" * 64, bytes=12),
    ingredients={"seed": 1, "sections": {"sft.lr": 0.1}},
    metrics={"loss": 0.5},
    code="deadbeef",
    environment="1" * 64,
    created="2026-01-02T03:04:05.678+00:00",
    seconds=1.5,
)


def edited(folder: Path, **changes: Any) -> None:
    path = folder / "sft" / "abc.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")


def test_a_record_comes_back_as_it_was_and_by_its_own_key_alone(tmp_path: Path) -> None:
    cache = StageCache(tmp_path)
    cache.write("sft", RECORD)
    assert cache.find("sft", "abc") == RECORD
    assert cache.find("sft", "abd") is None
    assert cache.find("grpo", "abc") is None


def test_the_records_of_a_stage_are_all_of_its_own(tmp_path: Path) -> None:
    cache = StageCache(tmp_path)
    later = dataclasses.replace(RECORD, key="def")
    for stage, record in (("sft", later), ("sft", RECORD), ("grpo", RECORD)):
        cache.write(stage, record)
    assert cache.records("sft") == (RECORD, later)
    assert cache.records("evaluate_base") == ()


def test_a_record_that_says_another_thing_than_was_written_counts_as_absent(tmp_path: Path) -> None:
    cache = StageCache(tmp_path)
    cache.write("sft", RECORD)
    path = tmp_path / "sft" / "abc.json"
    written = path.read_bytes()
    for place in range(len(written)):  # every bit that could flip, but for one that changes blanks alone
        path.write_bytes(written[:place] + bytes([written[place] ^ 1]) + written[place + 1 :])
        assert cache.find("sft", "abc") in (None, RECORD)
    (tmp_path / "grpo").mkdir()
    (tmp_path / "grpo" / "abc.json").write_bytes(written)
    assert cache.find("grpo", "abc") is None  # another stage's result
    (tmp_path / "sft" / "def.json").write_bytes(written)
    assert cache.find("sft", "def") is None
    path.write_bytes(written)
    edited(tmp_path, metrics={"loss": 0.4})
    assert cache.find("sft", "abc") is None


OTHER_FORMS = [{"format": 1}, {"format": 99}, {"ref": {"kind": "checkpoint"}}, {"ref": {}}, {"ref": None}]


@pytest.mark.parametrize("changes", [*OTHER_FORMS, "", "{", "[]"])
def test_a_record_of_another_form_counts_as_absent(tmp_path: Path, changes: dict[str, Any] | str) -> None:
    cache = StageCache(tmp_path)
    cache.write("sft", RECORD)
    if isinstance(changes, str):
        (tmp_path / "sft" / "abc.json").write_text(changes)
    else:
        edited(tmp_path, **changes)
    assert cache.find("sft", "abc") is None
    assert cache.records("sft") == ()


KEY = "k" * 64


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    with serve_s3() as server:
        yield server


@pytest.fixture(params=["folder", "s3"])
def shared(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SharedStore:
    if request.param == "folder":
        return SharedStore(str(tmp_path / "shared"))
    server: S3 = request.getfixturevalue("s3")
    return SharedStore(server.new_bucket(monkeypatch))


def home_at(folder: Path) -> Home:
    home = Home(folder)
    home.work.mkdir(parents=True)
    return home


def compute(home: Home, text: str = "7") -> Record:
    folder = home.work / "output"
    (folder / "deep").mkdir(parents=True)
    (folder / "number.txt").write_text(text)
    (folder / "deep" / "empty").write_text("")
    ref = ArtifactStore(home.root).commit(folder, kind="number", stage_key=KEY)
    record = Record(
        key=KEY, ref=ref, ingredients={"seed": 0}, metrics={}, code="c", environment="e", created="", seconds=1.0
    )
    StageCache(home.cache).write("make", record)
    return record


def test_a_result_reaches_another_machine_bit_for_bit(shared: SharedStore, tmp_path: Path) -> None:
    here, there = home_at(tmp_path / "here"), home_at(tmp_path / "there")
    shared.require_usable()
    assert shared.records("make", KEY) == ()
    record = compute(here)
    assert shared.publish("make", KEY, record, here)
    assert not shared.publish("make", KEY, record, here)
    assert shared.records("make", KEY) == (record,)
    shared.fetch(record.ref, there)
    assert ArtifactStore(there.root).errors(record.ref) == ()
    shared.fetch(record.ref, there)  # again, as two processes may
    assert list(there.work.iterdir()) == []


@pytest.mark.parametrize("damage", ["changed", "missing", "outside", "no manifest"])
def test_a_damaged_shared_artifact_is_published_again(shared: SharedStore, tmp_path: Path, damage: str) -> None:
    here, there = home_at(tmp_path / "here"), home_at(tmp_path / "there")
    record = compute(here)
    shared.publish("make", KEY, record, here)
    files, folder = shared.folder, record.ref.uri
    if damage == "changed":
        files.write(f"{folder}/number.txt", b"8")
    elif damage == "outside":
        manifest = json.loads(files.read(f"{folder}/{MANIFEST}") or b"")
        manifest["files"][0]["path"] = "../../outside"
        files.write(f"{folder}/{MANIFEST}", json.dumps(manifest).encode())
    else:
        files.remove(f"{folder}/{'number.txt' if damage == 'missing' else MANIFEST}")
    with pytest.raises(StorageError):
        shared.fetch(record.ref, there)
    assert not (there.root / record.ref.uri).exists()
    shared.withdraw("make", KEY, record)
    assert shared.records("make", KEY) == ()
    assert shared.publish("make", KEY, record, here)
    shared.fetch(record.ref, there)
    assert ArtifactStore(there.root).errors(record.ref) == ()


def test_one_process_holds_a_claim(shared: SharedStore) -> None:
    assert shared.claimant("make", KEY) == ""
    assert shared.claim("make", KEY, "a 1 x")
    assert not shared.claim("make", KEY, "b 2 y")
    shared.renew("make", KEY, "a 1 x.1")
    assert shared.claimant("make", KEY) == "a 1 x.1"
    shared.release("make", KEY)
    shared.release("make", KEY)
    assert shared.claim("make", KEY, "b 2 y")


def test_a_store_of_a_newer_format_is_refused(shared: SharedStore) -> None:
    shared.require_usable()
    shared.folder.write("rlcore-store.json", b'{"format": 2}')
    with pytest.raises(StorageError, match="format 2, and this rlcore knows 1"):
        shared.require_usable()


def test_a_store_that_does_not_answer_says_so(monkeypatch: pytest.MonkeyPatch, s3: S3) -> None:
    s3.new_bucket(monkeypatch)
    with pytest.raises(RemoteError, match="cannot be used"):
        SharedStore("s3://no-such-bucket/x").require_usable()
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{closed.getsockname()[1]}")
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
        with pytest.raises(RemoteError, match="cannot be used"):
            SharedStore("s3://bucket/away").require_usable()
