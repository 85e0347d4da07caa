from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlcore.errors import ConfigError, StorageError
from rlcore.tasks.store import settings
from rlcore.tasks.store.settings import Home, configure_environment, engine_name, find_home
from rlcore.tasks.store.state import databases
from rlcore.tasks.tracking.runs import open_tracker


def test_the_home_is_named_by_the_environment_or_below_the_current_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
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


def test_a_folder_of_prefect_elsewhere_is_known_to_all_that_search_the_state(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
def test_a_home_that_cannot_be_written_is_refused_with_its_source_its_owner_and_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str, source: str
) -> None:
    monkeypatch.setenv("RLCORE_HOME", named)
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="set RLCORE_HOME to a folder") as raised:
        configure_environment(Home(tmp_path / "file" / "state"))
    assert raised.value.where == str(tmp_path / "file" / "state")
    assert source in raised.value.what
    assert raised.value.what.endswith(f"{tmp_path / 'file'} belongs to {tmp_path.owner()}")


def test_prefect_is_the_engine_when_nothing_is_said_and_an_unknown_one_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RLCORE_ENGINE", "")
    assert engine_name() == "prefect"
    monkeypatch.setenv("RLCORE_ENGINE", "airflow")
    with pytest.raises(ConfigError, match="airflow"):
        engine_name()


def test_stages_and_engine_import_neither_prefect_nor_mlflow() -> None:
    # Both read their settings when they are imported, and cost seconds: no inline run may pay for Prefect.
    heavy = "('prefect', 'mlflow', 'torch')"
    code = f"import sys, rlcore.tasks.run.pipeline; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_where_postgresql_has_a_user_of_its_own_others_pass_through_a_home_and_see_nothing(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "_is_passed", lambda _: True)
    folders = (home.artifacts, home.cache, home.work, home.leases, home.prefect, home.mlartifacts)
    for folder in (home.root, *folders):
        folder.chmod(0o755)
    configure_environment(home)
    assert home.root.stat().st_mode & 0o777 == 0o701
    assert {folder.stat().st_mode & 0o777 for folder in folders} == {0o700}


def test_databases_on_a_network_disk_are_refused_and_servers_are_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
