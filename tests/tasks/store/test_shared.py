"""The shared store in a folder and on an S3 server that answers over HTTP."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlcore.errors import ConfigError, StorageError
from rlcore.tasks.store.artifacts import MANIFEST, ArtifactStore
from rlcore.tasks.store.cache import Record, StageCache
from rlcore.tasks.store.remote import RemoteError
from rlcore.tasks.store.settings import Home
from rlcore.tasks.store.shared import SharedStore
from tests.s3_server import S3, serve_s3

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
def test_a_damaged_artifact_is_not_taken_and_is_published_again(
    shared: SharedStore, tmp_path: Path, damage: str
) -> None:
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


def test_a_record_that_was_changed_counts_as_absent(shared: SharedStore, tmp_path: Path) -> None:
    here = home_at(tmp_path / "here")
    shared.publish("make", KEY, compute(here), here)
    path = f"records/make/{KEY}/{KEY}.json"
    shared.folder.write(path, (shared.folder.read(path) or b"").replace(b'"seconds": 1.0', b'"seconds": 2.0'))
    assert shared.records("make", KEY) == ()


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


def test_an_unknown_protocol_is_a_mistake_of_the_variable() -> None:
    with pytest.raises(ConfigError, match="RLCORE_STORE"):
        SharedStore("sss://bucket").require_usable()
