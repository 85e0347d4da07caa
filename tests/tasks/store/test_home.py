"""The state directory: its folders and rights, and the versions that wrote in it."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlcore.errors import ConfigError, StorageError
from rlcore.flows.cli.app import main
from rlcore.tasks.store import settings
from rlcore.tasks.store.cache import RECORD_FORMAT
from rlcore.tasks.store.locks import locked_file
from rlcore.tasks.store.settings import Home, configure_environment, engine_name, find_home
from rlcore.tasks.store.state import databases, require_readable, upgrade
from rlcore.tasks.tracking.runs import open_tracker


def test_the_home_is_a_variable_or_the_current_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RLCORE_HOME", str(tmp_path / "state"))
    assert find_home() == Home(tmp_path / "state")
    monkeypatch.delenv("RLCORE_HOME")
    monkeypatch.chdir(tmp_path)
    assert find_home() == Home(tmp_path / ".rlcore")


def test_configuring_makes_the_folders_and_places_both_tools_inside(home: Home) -> None:
    assert {path.name for path in home.root.iterdir()} == {
        "artifacts", "cache", "leases", "mlartifacts", "prefect", "versions.json", "work",
    }  # fmt: skip
    assert os.environ["RLCORE_HOME"] == str(home.root)
    assert os.environ["MLFLOW_TRACKING_URI"] == f"sqlite:///{home.root}/mlflow.db"


def modes(home: Home) -> dict[str, int]:
    paths = (home.root, home.root / "mlflow.db", home.prefect / "prefect.db")
    return {path.name: path.stat().st_mode & 0o777 for path in paths}


def test_a_home_and_its_databases_are_for_their_owner_alone(home: Home) -> None:
    open_tracker(home)
    assert modes(home) == {"home": 0o700, "mlflow.db": 0o600, "prefect.db": 0o600}


def test_a_home_that_everybody_may_read_is_closed_by_the_next_command(home: Home) -> None:
    (home.root / "mlflow.db").touch()
    (home.root / "interfaces").mkdir()
    users = home.root / "interfaces" / "basic_auth.db"
    users.touch()
    for path in (home.root, home.root / "mlflow.db", home.prefect / "prefect.db", users):
        path.chmod(0o777 if path.is_dir() else 0o644)
    configure_environment(home)
    assert modes(home) == {"home": 0o700, "mlflow.db": 0o600, "prefect.db": 0o600}
    assert users.stat().st_mode & 0o777 == 0o600


def test_a_folder_that_somebody_else_owns_is_used_as_it_is(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    home.root.chmod(0o770)

    def refuse(path: Path, mode: int) -> None:
        raise PermissionError(f"{path} {mode}")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "chmod", refuse)
        configure_environment(home)
    assert home.root.stat().st_mode & 0o777 == 0o770


def test_nothing_calls_home_and_nothing_is_unpickled(home: Home) -> None:
    expected = {
        "DO_NOT_TRACK": "1",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "PREFECT_RESULTS_DEFAULT_SERIALIZER": "json",
        "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false",
    }
    assert {name: os.environ[name] for name in expected} == expected


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking.example")
    monkeypatch.setenv("RLCORE_HOME", "")
    configure_environment(Home(tmp_path / "state"))
    assert os.environ["MLFLOW_TRACKING_URI"] == "http://tracking.example"


def test_prefect_may_have_its_folder_elsewhere(home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert home.prefect == home.root / "prefect"
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("RLCORE_ENGINE", "prefect")
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    configure_environment(home)
    database = tmp_path / "elsewhere" / "prefect.db"
    assert os.environ["PREFECT_HOME"] == str(database.parent)
    assert [each.path for each in databases(home)][-1] == database
    assert database.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(("named", "source"), [("x", "RLCORE_HOME names it"), ("", "it is the default")])
def test_an_unwritable_home_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str, source: str
) -> None:
    monkeypatch.setenv("RLCORE_HOME", named)
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="set RLCORE_HOME to a folder") as raised:
        configure_environment(Home(tmp_path / "file" / "state"))
    assert raised.value.where == str(tmp_path / "file" / "state")
    assert source in raised.value.what
    assert raised.value.what.endswith(f"{tmp_path / 'file'} belongs to {tmp_path.owner()}")


def test_prefect_is_the_default_engine_and_others_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLCORE_ENGINE", "")
    assert engine_name() == "prefect"
    monkeypatch.setenv("RLCORE_ENGINE", "airflow")
    with pytest.raises(ConfigError, match="airflow"):
        engine_name()


def test_the_user_of_postgresql_passes_through_a_home(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_is_passed", lambda _: True)
    home.pages.mkdir()
    folders = (home.artifacts, home.cache, home.work, home.leases, home.prefect, home.mlartifacts, home.pages)
    for folder in (home.root, *folders):
        folder.chmod(0o755)
    configure_environment(home)
    assert home.root.stat().st_mode & 0o777 == 0o701
    assert {folder.stat().st_mode & 0o777 for folder in folders} == {0o700}


def test_databases_on_a_network_disk_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounted = [SimpleNamespace(mountpoint="/", fstype="ext4"), SimpleNamespace(mountpoint=str(tmp_path), fstype="nfs4")]
    monkeypatch.setattr("psutil.disk_partitions", lambda **_: mounted)
    monkeypatch.setenv("RLCORE_ENGINE", "inline")
    monkeypatch.setenv("RLCORE_HOME", "")
    for name in ("MLFLOW_TRACKING_URI", "PREFECT_API_URL"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(StorageError, match=r"network file system \(nfs4\), where the databases of mlflow break"):
        configure_environment(Home(tmp_path / "home"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000")
    configure_environment(Home(tmp_path / "home"))


@pytest.fixture
def filled(tracked_home: Home) -> Home:
    """A home with MLflow's tables and a note of the installed versions."""
    require_readable(tracked_home)
    return tracked_home


def note(home: Home) -> dict[str, dict[str, str]]:
    loaded: dict[str, dict[str, str]] = json.loads((home.root / "versions.json").read_text())
    return loaded


def rewrite(home: Home, **versions: str) -> None:
    """Say that other versions wrote the home."""
    found = note(home)
    for tool, version in versions.items():
        found[tool] = {"version": version, "schema": found[tool]["schema"]}
    (home.root / "versions.json").write_text(json.dumps(found))


def move_schema(path: Path, schema: str) -> None:
    with closing(sqlite3.connect(path)) as database:
        database.execute("UPDATE alembic_version SET version_num = ?", (schema,))
        database.commit()


def older_schema(home: Home) -> str:
    """One that MLflow has left behind."""
    known, newest = databases(home)[0].schemas()
    return min(known - newest)


def test_a_home_notes_the_versions_that_write_in_it(filled: Home) -> None:
    mlflow = databases(filled)[0]
    assert note(filled)["mlflow"] == {"version": mlflow.installed, "schema": mlflow.schema}
    assert mlflow.schema in mlflow.schemas()[1]
    assert note(filled)["records"] == RECORD_FORMAT


def test_a_database_of_a_newer_version_is_refused_by_name_and_left_alone(filled: Home) -> None:
    path = filled.root / "mlflow.db"
    move_schema(path, "feedfeedfeed")
    rewrite(filled, mlflow="99.1")
    before = path.read_bytes()
    for refused in (configure_environment, upgrade):
        with pytest.raises(StorageError, match=r"written by a newer mlflow, 99\.1; .* is installed and cannot read it"):
            refused(filled)
    assert path.read_bytes() == before


@pytest.mark.parametrize("newer", [RECORD_FORMAT + 1, "x"])
def test_a_home_of_a_newer_format_is_refused_and_left_alone(filled: Home, newer: int | str) -> None:
    written = json.dumps({**note(filled), "records": newer})
    (filled.root / "versions.json").write_text(written)
    for refused in (configure_environment, upgrade):
        with pytest.raises(StorageError, match=rf"written by a newer rlcore \(format {newer!r}, this one knows "):
            refused(filled)
    assert (filled.root / "versions.json").read_text() == written


@pytest.mark.parametrize("older", [{"records": RECORD_FORMAT - 1}, {}], ids=["noted", "of the first versions"])
def test_a_home_of_an_older_format_goes_on_and_is_noted(filled: Home, older: dict[str, int]) -> None:
    tools = {name: each for name, each in note(filled).items() if name != "records"}
    (filled.root / "versions.json").write_text(json.dumps(tools | older))
    configure_environment(filled)
    assert note(filled) == {**tools, "records": RECORD_FORMAT}


@pytest.mark.parametrize("noted", ["1.0", ""])
def test_a_database_of_an_older_version_is_not_touched_before_somebody_asks(filled: Home, noted: str) -> None:
    path = filled.root / "mlflow.db"
    move_schema(path, older_schema(filled))
    if noted:
        rewrite(filled, mlflow=noted)
    else:  # made before homes noted anything, or the note is damaged
        (filled.root / "versions.json").write_text("{")
    before = path.read_bytes()
    with pytest.raises(StorageError, match=r"have an older schema: mlflow\.db") as caught:
        configure_environment(filled)
    assert "rlcore upgrade" in caught.value.fix
    assert path.read_bytes() == before


def test_tables_that_were_being_made_when_the_same_version_was_killed_are_finished_by_it(filled: Home) -> None:
    move_schema(filled.root / "mlflow.db", older_schema(filled))
    configure_environment(filled)


def make_older(home: Home) -> str:
    """Leave the newest migration of MLflow's tables out, and put an experiment in them; return their schema."""
    from alembic import command
    from mlflow.store.db.utils import _get_alembic_config

    command.downgrade(_get_alembic_config(home.tracking_uri), "-1")
    with closing(sqlite3.connect(home.root / "mlflow.db")) as database:
        insert = "INSERT INTO experiments (name, artifact_location, lifecycle_stage) VALUES ('kept', 'x', 'active')"
        database.execute(insert)
        database.commit()
    return databases(home)[0].schema


def test_the_command_copies_an_older_database_and_brings_it_up(
    tracked_home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    before = make_older(tracked_home)
    rewrite(tracked_home, mlflow="1.0")
    assert main(["lineage", "any/1"]) == 1
    assert "rlcore upgrade" in capsys.readouterr().err
    assert databases(tracked_home)[0].schema == before
    assert main(["upgrade"]) == 0
    copy = tracked_home.root / "backups" / f"mlflow-{before}.db"
    assert str(copy) in capsys.readouterr().out
    with closing(sqlite3.connect(copy)) as database:
        assert database.execute("SELECT version_num FROM alembic_version").fetchone() == (before,)
    assert open_tracker(tracked_home).client.get_experiment_by_name("kept") is not None
    assert main(["upgrade"]) == 0
    assert "every database is of the installed versions" in capsys.readouterr().out


def test_a_database_that_cannot_be_brought_up_is_as_it_was(
    filled: Home, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    older = older_schema(filled)
    move_schema(filled.root / "mlflow.db", older)
    rewrite(filled, mlflow="1.0")

    def half(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        move_schema(filled.root / "mlflow.db", "feedfeedfeed")
        return subprocess.CompletedProcess(command, 1, "", "a line\nno such table: x\n")

    monkeypatch.setattr("rlcore.tasks.store.state.subprocess.run", half)
    assert main(["upgrade"]) == 1
    assert "unchanged: no such table: x" in capsys.readouterr().err
    assert databases(filled)[0].schema == older


def test_nothing_is_brought_up_while_a_run_is_under_way(filled: Home) -> None:
    with locked_file(filled.leases / "a.json", "{}"), pytest.raises(StorageError, match="a run is active"):
        upgrade(filled)


def test_a_server_elsewhere_has_databases_of_its_own(filled: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    move_schema(filled.root / "mlflow.db", "feedfeedfeed")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking.example")
    configure_environment(filled)
