"""Dumps of the services' databases, by a program that stands for PostgreSQL's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from rlcore.errors import ServiceError
from rlcore.tasks.operations.backup import back_up
from rlcore.tasks.operations.backup_target import BackupTarget
from rlcore.tasks.operations.postgres import dump_databases, services_folder
from rlcore.tasks.operations.restore import describe, restore
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


def test_both_databases_are_dumped_with_the_password_in_the_environment(services: Path, home: Home) -> None:
    dumps = dict(dump_databases(home, home.work))
    assert list(dumps) == ["dumps/mlflow.dump", "dumps/prefect.dump"]
    said = dumps["dumps/mlflow.dump"].read_text()
    assert "--port=5499 --username=mlflow --no-password --dbname=mlflow" in said
    assert said.count("first-secret") == 1
    assert said.endswith(" first-secret\n")


def test_a_backup_has_the_dumps_and_files_of_services_and_no_password(
    services: Path, home: Home, tmp_path: Path
) -> None:
    found = back_up(home, str(tmp_path / "target")).manifest
    paths = {each.path for each in found.files}
    assert paths >= {"dumps/mlflow.dump", "dumps/prefect.dump", "services/mlflow-artifacts/1/model.bin"}
    assert [path for path in paths if "passwords" in path or "clients" in path] == []
    names = BackupTarget(str(tmp_path / "target")).contents()
    stored = [(tmp_path / "target" / "content" / name[:2] / name).read_bytes() for name in names]
    assert not any(b"third-secret" in each for each in stored)


def test_files_of_services_are_restored_where_the_services_are(services: Path, home: Home, tmp_path: Path) -> None:
    back_up(home, str(tmp_path / "target"))
    shutil.rmtree(services)
    other = Home(tmp_path / "other")
    assert "loads the databases in dumps/" in describe(other, restore(other, str(tmp_path / "target")))
    assert (services / "mlflow-artifacts" / "1" / "model.bin").read_bytes() == b"weights"
    assert (other.root / "dumps" / "mlflow.dump").exists()


def test_a_database_that_does_not_answer_ends_the_backup(services: Path, home: Home, tmp_path: Path) -> None:
    (tmp_path / "bin" / "pg_dump").write_text("#!/bin/sh\necho 'connection refused' >&2\nexit 1\n")
    with pytest.raises(ServiceError, match="pg_dump of the database mlflow failed: connection refused"):
        back_up(home, str(tmp_path / "target"))
    assert BackupTarget(str(tmp_path / "target")).names() == ()


def test_services_are_in_the_home_unless_they_are_named(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RLCORE_SERVICES", raising=False)
    assert services_folder(home.root) == home.root / "services"
    assert list(dump_databases(home, home.work)) == []
