from __future__ import annotations

import configparser
import subprocess
import sys
from pathlib import Path

import pytest

from rlcore.flows.cli.app import main
from rlcore.tasks.operations import ui_servers
from rlcore.tasks.operations.server_access import client_variables, mlflow_command, mlflow_variables, prefect_variables
from rlcore.tasks.store.settings import Home

KNOWN = {"web": "w" * 32, "mlflow_sessions": "s" * 32}


def test_prefect_asks_for_the_password_that_its_clients_have_and_trusts_its_own_page_alone() -> None:
    told = prefect_variables(4201, KNOWN["web"])
    assert told["PREFECT_SERVER_API_AUTH_STRING"] == client_variables(KNOWN["web"])["PREFECT_API_AUTH_STRING"]
    assert told["PREFECT_SERVER_CORS_ALLOWED_ORIGINS"] == "http://127.0.0.1:4201,http://localhost:4201"
    assert told["RLCORE_PREFECT_HOSTS"] == "127.0.0.1,localhost"


def test_mlflow_asks_for_the_password_that_its_clients_have_and_trusts_its_own_page_alone(tmp_path: Path) -> None:
    told, has = mlflow_variables(tmp_path, 5001, KNOWN), client_variables(KNOWN["web"])
    for name in ("USERNAME", "PASSWORD"):
        assert told[f"MLFLOW_AUTH_ADMIN_{name}"] == has[f"MLFLOW_TRACKING_{name}"]
    assert told["MLFLOW_FLASK_SERVER_SECRET_KEY"] == KNOWN["mlflow_sessions"]
    assert told["MLFLOW_SERVER_ALLOWED_HOSTS"] == "127.0.0.1:5001,localhost:5001"
    assert told["MLFLOW_SERVER_CORS_ALLOWED_ORIGINS"] == "http://127.0.0.1:5001,http://localhost:5001"
    assert told["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] == "false"
    settings = Path(told["MLFLOW_AUTH_CONFIG_PATH"])
    assert settings.stat().st_mode & 0o777 == 0o600
    read = configparser.ConfigParser()
    read.read(settings)
    assert read["mlflow"]["database_uri"] == f"sqlite:///{tmp_path}/mlflow-users.db"
    assert not any(secret in settings.read_text() for secret in KNOWN.values())
    command = mlflow_command(5001, "--serve-artifacts")
    assert command[command.index("--app-name") + 1] == "basic-auth"


def test_the_interfaces_print_one_password_and_start_both_servers_with_it(
    tracked_home: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[dict[str, tuple[list[str], dict[str, str]]]] = []
    monkeypatch.setattr(ui_servers, "run_until_interrupt", lambda commands: started.append(dict(commands)) or 0)
    monkeypatch.setattr(ui_servers, "rewrite_artifact_paths", lambda _: None)
    monkeypatch.setattr(ui_servers.signal, "signal", lambda *_: None)
    said = []
    for _ in range(2):
        assert main(["ui", "--mlflow-port", "45001", "--prefect-port", "45002"]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]  # a browser that remembers it is let in tomorrow too
    variables = {name: each[1] for name, each in started[0].items()}
    password = variables["MLflow"]["MLFLOW_AUTH_ADMIN_PASSWORD"]
    assert variables["Prefect"]["PREFECT_SERVER_API_AUTH_STRING"] == f"rlcore:{password}"
    assert password in said[0]
    assert (tracked_home.root / "interfaces").stat().st_mode & 0o777 == 0o700
    assert (tracked_home.root / "interfaces" / "passwords.json").stat().st_mode & 0o777 == 0o600
    assert password not in str([each[0] for each in started[0].values()])  # anybody may read a command line


EMBEDDED = """
import os
from pathlib import Path
from rlcore.tasks.store.settings import Home, configure_environment
configure_environment(Home(Path(os.environ["RLCORE_HOME"])))
print(os.environ.get("PREFECT_API_AUTH_STRING"), os.environ.get("PREFECT_SERVER_API_AUTH_STRING"))
print(os.environ.get("PREFECT_SERVER_CORS_ALLOWED_ORIGINS"))
"""


def embedded(tmp_path: Path, **variables: str) -> list[str]:
    environment = {"PATH": "", "PYTHONPATH": str(Path(__file__).parents[3]), "RLCORE_HOME": str(tmp_path), **variables}
    done = subprocess.run([sys.executable, "-c", EMBEDDED], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_the_embedded_server_lets_its_own_process_in_and_no_other(tmp_path: Path) -> None:
    (client, server, origin), (other, *_) = embedded(tmp_path), embedded(tmp_path)
    assert client == server != other
    assert client.startswith("rlcore:")
    assert origin.endswith(".invalid")


def test_a_server_of_ones_own_is_told_what_its_owner_has_set(tmp_path: Path) -> None:
    assert embedded(tmp_path, PREFECT_API_URL="http://127.0.0.1:4200/api") == ["None"] * 3
    found = embedded(tmp_path, PREFECT_API_URL="http://127.0.0.1:4200/api", PREFECT_API_AUTH_STRING="me:mine")
    assert found == ["me:mine", "None", "None"]
    assert embedded(tmp_path, PREFECT_API_AUTH_STRING="me:mine")[:2] == ["me:mine", "me:mine"]
