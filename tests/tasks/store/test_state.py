"""A home that other versions wrote: refused, brought up after a copy, or left as it is."""

from __future__ import annotations

import json
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

import pytest

from rlcore.errors import StorageError
from rlcore.flows.cli.app import main
from rlcore.tasks.store.cache import RECORD_FORMAT
from rlcore.tasks.store.locks import locked_file
from rlcore.tasks.store.settings import Home, configure_environment
from rlcore.tasks.store.state import databases, require_readable, upgrade
from rlcore.tasks.tracking.runs import open_tracker


@pytest.fixture
def filled(tracked_home: Home) -> Home:
    """A home with MLflow's tables and a note of the installed versions."""
    require_readable(tracked_home)
    return tracked_home


def note(home: Home) -> dict[str, dict[str, str]]:
    loaded: dict[str, dict[str, str]] = json.loads((home.root / "versions.json").read_text())
    return loaded


def test_what_a_kill_left_of_the_note_goes_when_the_note_is_written(tracked_home: Home) -> None:
    left = tracked_home.root / ".versions.json.0123abcd.tmp"
    left.touch()
    require_readable(tracked_home)
    assert note(tracked_home)
    assert not left.exists()


def rewrite(home: Home, **versions: str) -> None:
    """Say that other versions wrote the home."""
    told = note(home)
    for tool, version in versions.items():
        told[tool] = {"version": version, "schema": told[tool]["schema"]}
    (home.root / "versions.json").write_text(json.dumps(told))


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


def test_another_version_with_the_same_schema_goes_on_and_is_noted(filled: Home) -> None:
    rewrite(filled, mlflow="1.0")
    configure_environment(filled)
    assert note(filled)["mlflow"]["version"] == databases(filled)[0].installed


def make_older(home: Home) -> str:
    """MLflow's tables as one version before had them, with an experiment; their schema."""
    from alembic import command
    from alembic.script import ScriptDirectory
    from mlflow.store.db.utils import _get_alembic_config
    from mlflow.store.tracking.dbmodels.initial_models import Base
    from sqlalchemy import create_engine

    engine = create_engine(home.tracking_uri)
    Base.metadata.create_all(engine)
    config = _get_alembic_config(home.tracking_uri)
    newest = ScriptDirectory.from_config(config).get_revision("head")
    assert newest is not None
    command.upgrade(config, str(newest.down_revision))
    engine.dispose()
    with closing(sqlite3.connect(home.root / "mlflow.db")) as database:
        insert = "INSERT INTO experiments (name, artifact_location, lifecycle_stage) VALUES ('kept', 'x', 'active')"
        database.execute(insert)
        database.commit()
    return databases(home)[0].schema


def test_the_command_copies_an_older_database_and_brings_it_up(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    before = make_older(home)
    rewrite(home, mlflow="1.0")
    assert main(["lineage", "any/1"]) == 1
    assert "rlcore upgrade" in capsys.readouterr().err
    assert databases(home)[0].schema == before
    assert main(["upgrade"]) == 0
    copy = home.root / "backups" / f"mlflow-{before}.db"
    assert str(copy) in capsys.readouterr().out
    with closing(sqlite3.connect(copy)) as database:
        assert database.execute("SELECT version_num FROM alembic_version").fetchone() == (before,)
    assert open_tracker(home).client.get_experiment_by_name("kept") is not None
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
    with (
        locked_file(filled.leases / "a.json", "{}"),
        pytest.raises(StorageError, match="a run is active"),
    ):
        upgrade(filled)


def test_a_server_elsewhere_has_databases_of_its_own(filled: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    move_schema(filled.root / "mlflow.db", "feedfeedfeed")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking.example")
    configure_environment(filled)
