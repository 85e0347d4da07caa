"""Dumps of databases: what is in them, which stay, and what restores them."""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

import pytest

from rlcore.errors import ServiceError, StorageError
from rlcore.flows.cli.app import main
from rlcore.tasks.operations.dump import make_dump, restore_dump
from rlcore.tasks.run.leases import hold_lease
from rlcore.tasks.store.audit_log import read_entries
from rlcore.tasks.store.settings import Home, configure_environment
from rlcore.tasks.store.state import newest_dump

COUNT = "SELECT count(*) FROM experiments WHERE name = 'kept'"


@pytest.fixture
def dumped(tracked_home: Home) -> Home:
    """A home with a dump that has a row of the database's log of changes."""
    with closing(sqlite3.connect(tracked_home.root / "mlflow.db")) as database:
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("INSERT INTO experiments (name, lifecycle_stage) VALUES ('kept', 'active')")
        database.commit()
        make_dump(tracked_home)
    return tracked_home


def lose(home: Home) -> None:
    for path in home.root.glob("mlflow.db*"):
        path.unlink()


def newest(home: Home) -> Path:
    found = newest_dump(home.root)
    assert found is not None
    return found


def test_a_dump_is_private_and_its_digests_are_those_of_sha256sum(dumped: Home) -> None:
    names = {path.name for path in newest(dumped).iterdir()}
    assert names == {"mlflow.sqlite", "SHA256SUMS"}
    assert (dumped.root / "dumps").stat().st_mode & 0o777 == 0o700
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=newest(dumped), check=True)
    assert [path.name for path in dumped.work.iterdir()] == []


def test_the_newest_few_stay(dumped: Home) -> None:
    first = newest(dumped)
    for _ in range(7):
        make_dump(dumped)
    assert not first.exists()
    assert len(list(first.parent.glob("[0-9]*"))) == 7


def test_a_lost_database_stops_commands_until_a_restore(dumped: Home, capsys: pytest.CaptureFixture[str]) -> None:
    lose(dumped)
    (dumped.root / "mlflow.db-wal").write_bytes(b"changes to the lost one")
    for refused in (configure_environment, make_dump):
        with pytest.raises(StorageError) as caught:
            refused(dumped)
        assert newest(dumped).name in str(caught.value)
    assert not (dumped.root / "mlflow.db").exists()
    assert main(["dump", "--restore"]) == 0
    assert capsys.readouterr().out.startswith(f"restored {dumped.root / 'mlflow.db'} from ")
    configure_environment(dumped)
    with closing(sqlite3.connect(dumped.root / "mlflow.db")) as database:
        assert database.execute(COUNT).fetchone() == (1,)
    entry = read_entries(dumped)[-1]
    assert (entry.action, entry.details) == ("restore", {"dump": newest(dumped).name})


def test_a_database_that_is_there_or_in_use_is_never_replaced(dumped: Home, tmp_path: Path) -> None:
    before = (dumped.root / "mlflow.db").read_bytes()
    with pytest.raises(StorageError, match="every database is here"):
        restore_dump(dumped)
    assert (dumped.root / "mlflow.db").read_bytes() == before
    with hold_lease(dumped, experiment="tiny"), pytest.raises(StorageError, match="a run is active here"):
        restore_dump(dumped)
    with pytest.raises(StorageError, match="there is no dump"):
        restore_dump(Home(tmp_path / "other"))


@pytest.mark.parametrize("damage", ["changed", "removed", "added", "no digests"])
def test_a_damaged_dump_is_refused_and_the_one_before_can_be_taken(dumped: Home, damage: str) -> None:
    make_dump(dumped)
    lose(dumped)
    copy, sums = newest(dumped) / "mlflow.sqlite", newest(dumped) / "SHA256SUMS"
    if damage == "changed":
        copy.write_bytes(copy.read_bytes()[:-1] + b"x")
    elif damage == "added":
        (newest(dumped) / "prefect.sqlite").write_bytes(b"x")
    else:
        (sums if damage == "no digests" else copy).unlink()
    with pytest.raises(StorageError, match="the dump is damaged: ") as caught:
        restore_dump(dumped)
    assert str(newest(dumped)) in caught.value.fix
    assert not (dumped.root / "mlflow.db").exists()
    shutil.rmtree(newest(dumped))
    restore_dump(dumped)
    assert (dumped.root / "mlflow.db").exists()


def test_a_database_that_cannot_be_read_is_one_error_and_no_dump(dumped: Home) -> None:
    first = newest(dumped)
    lose(dumped)
    (dumped.root / "mlflow.db").write_bytes(b"no database at all" * 100)
    with pytest.raises(StorageError, match="not dumped: file is not a database"):
        make_dump(dumped)
    assert newest(dumped) == first


def test_databases_of_a_server_elsewhere_are_named(dumped: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking.example")
    assert "not in it: the database of http://tracking.example" in make_dump(dumped)


def test_where_nothing_was_run_there_is_nothing_to_dump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLCORE_HOME", str(tmp_path / "none"))
    assert (main(["dump"]), main(["dump", "--restore"])) == (1, 1)
    assert not (tmp_path / "none").exists()


PROGRAM = """#!/bin/sh
for each in "$@"; do case $each in --file=*) file=${each#--file=};; esac; done
echo "$0 $* $PGPASSWORD" > "$file"
"""


@pytest.fixture
def services(home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of services outside of the home, and the program in the search path."""
    folder, programs = tmp_path / "services", tmp_path / "bin"
    for each in (folder / "mlflow-artifacts" / "1", programs):
        each.mkdir(parents=True)
    monkeypatch.setenv("RLCORE_SERVICES", str(folder))
    (folder / "passwords.json").write_text(json.dumps({"mlflow": "first-secret", "prefect": "second-secret"}))
    (folder / "layout.json").write_text(json.dumps({"ports": {"postgres": 5499}}))
    (folder / "clients.env").write_text("export MLFLOW_TRACKING_PASSWORD=third-secret\n")
    (folder / "mlflow-artifacts" / "1" / "model.bin").write_bytes(b"weights")
    (programs / "pg_dump").write_text(PROGRAM)
    (programs / "pg_dump").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    return folder


def test_a_dump_has_both_databases_and_no_password(services: Path, tracked_home: Home) -> None:
    text = make_dump(tracked_home)
    assert text.rstrip().endswith(": mlflow.dump, mlflow.sqlite, prefect.dump")
    (dump,) = (tracked_home.root / "dumps").glob("[0-9]*")
    words = (dump / "mlflow.dump").read_text()
    assert "--port=5499 --username=mlflow --no-password --dbname=mlflow" in words
    assert words.count("first-secret") == 1
    assert words.endswith(" first-secret\n")  # of the environment
    left_out = (tracked_home.root / "dumps" / "exclude").read_text().splitlines()
    assert left_out[-2:] == [f"{services}/*", f"!{services}/mlflow-artifacts"]


def test_a_dump_without_a_database_of_the_last_one_is_refused(services: Path, tracked_home: Home) -> None:
    make_dump(tracked_home)
    (services / "passwords.json").unlink()
    with pytest.raises(StorageError, match="has a database that is not here now"):
        make_dump(tracked_home)


def test_dumps_of_services_alone_are_left_to_them(services: Path, home: Home) -> None:
    make_dump(home)
    assert restore_dump(home).startswith("`make services` loads mlflow.dump, prefect.dump and draws new passwords\n")


def test_a_database_that_does_not_answer_ends_the_dump(services: Path, tracked_home: Home) -> None:
    (services.parent / "bin" / "pg_dump").write_text("#!/bin/sh\necho 'connection refused' >&2\nexit 1\n")
    with pytest.raises(ServiceError, match="pg_dump of the database mlflow failed: connection refused"):
        make_dump(tracked_home)
    assert not (tracked_home.root / "dumps").exists()
