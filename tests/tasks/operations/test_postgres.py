"""Dumps of the services' databases, by a program that stands for PostgreSQL's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlcore.errors import ServiceError, StorageError
from rlcore.tasks.operations.dump import make_dump, restore_dump
from rlcore.tasks.operations.postgres import services_folder
from rlcore.tasks.store.settings import Home

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
    said = (dump / "mlflow.dump").read_text()
    assert "--port=5499 --username=mlflow --no-password --dbname=mlflow" in said
    assert said.count("first-secret") == 1
    assert said.endswith(" first-secret\n")  # of the environment
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


def test_services_are_in_the_home_unless_they_are_named(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RLCORE_SERVICES", raising=False)
    assert services_folder(home.root) == home.root / "services"
