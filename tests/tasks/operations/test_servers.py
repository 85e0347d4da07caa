"""Servers of Prefect and MLflow: who is let in, their ports and ends, and rlcore doctor --services."""

from __future__ import annotations

import asyncio
import base64
import configparser
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from flask import Flask
from prefect.settings import (
    PREFECT_SERVER_API_AUTH_STRING,
    PREFECT_SERVER_CORS_ALLOWED_ORIGINS,
    PREFECT_UI_ENABLED,
    temporary_settings,
)

from rlcore.errors import ServiceError
from rlcore.flows.cli.app import main
from rlcore.tasks.operations import ui_servers
from rlcore.tasks.operations.doctor import DoctorCheck, check_services
from rlcore.tasks.operations.prefect_server import HOSTS, guarded
from rlcore.tasks.operations.server_access import client_variables, mlflow_command, mlflow_variables, prefect_variables
from rlcore.tasks.operations.ui_servers import run_until_interrupt
from rlcore.tasks.store.settings import Home
from rlcore.tasks.tracking import mlflow_access
from tests.http_servers import free_port
from tests.waiting import LONG, until_ended

PORT, PASSWORD = 4200, "p" * 32
OWN, FOREIGN = f"http://127.0.0.1:{PORT}", "http://evil.example"
LET_IN = {"Authorization": f"Basic {base64.b64encode(f'rlcore:{PASSWORD}'.encode()).decode()}"}
NOTHING_LISTENS = 404  # the path after the checks: no database is asked


def answers(requests: Mapping[str, tuple[str, str, Mapping[str, str]]]) -> dict[str, httpx.Response]:
    """Return the guarded application's answer to each request: method, path, headers."""
    known = prefect_variables(PORT, PASSWORD)
    settings = {
        PREFECT_SERVER_API_AUTH_STRING: known["PREFECT_SERVER_API_AUTH_STRING"],
        PREFECT_SERVER_CORS_ALLOWED_ORIGINS: known["PREFECT_SERVER_CORS_ALLOWED_ORIGINS"],
        PREFECT_UI_ENABLED: False,
    }

    async def ask() -> dict[str, httpx.Response]:
        with temporary_settings(settings):
            async with httpx.AsyncClient(transport=httpx.ASGITransport(guarded()), base_url=OWN) as client:
                return {
                    name: await client.request(method, path, headers=dict(headers), content=b"{}")
                    for name, (method, path, headers) in requests.items()
                }

    return asyncio.run(ask())


FLOWS, MISSING = "/api/flow_runs/", "/api/no-such-path"
QUESTION = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
REQUESTS: dict[str, tuple[int, tuple[str, str, Mapping[str, str]]]] = {
    "a post without content type": (401, ("POST", FLOWS, {})),
    "a post of a foreign page": (401, ("POST", FLOWS, {"Origin": FOREIGN, "Content-Type": "text/plain"})),
    "a wrong password": (401, ("POST", FLOWS, {"Authorization": "Basic cmxjb3JlOng="})),
    "a foreign host": (400, ("GET", "/api/health", {"Host": "evil.example"})),
    "a foreign host with the port": (400, ("POST", FLOWS, {"Host": f"evil.example:{PORT}", **LET_IN})),
    "the question of a foreign page": (400, ("OPTIONS", FLOWS, {"Origin": FOREIGN, **QUESTION})),
    "the question of its own page": (200, ("OPTIONS", FLOWS, {"Origin": OWN, **QUESTION})),
    "health": (200, ("GET", "/api/health", {})),
    "with the password": (NOTHING_LISTENS, ("GET", MISSING, LET_IN)),
    "by its other name": (NOTHING_LISTENS, ("GET", MISSING, {"Host": f"localhost:{PORT}", **LET_IN})),
}


def test_a_browser_sees_the_status_and_no_foreign_page_may_read_an_answer(
    record_property: Callable[[str, object], None],
) -> None:
    hostile = sum(status in (400, 401) for status, _ in REQUESTS.values())
    record_property("hostile", hostile)
    record_property("sound", len(REQUESTS) - hostile)
    found = answers({name: request for name, (_, request) in REQUESTS.items()})
    assert {name: each.status_code for name, each in found.items()} == {
        name: status for name, (status, _) in REQUESTS.items()
    }
    allowed = {name: each.headers.get("access-control-allow-origin") for name, each in found.items()}
    assert {name: origin for name, origin in allowed.items() if origin} == {"the question of its own page": OWN}


def test_the_names_by_which_it_is_reached_may_be_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOSTS, "prefect, other.example")
    asked = {name: ("GET", "/api/health", {"Host": f"{name}:4200"}) for name in ("prefect", "other.example", "x")}
    assert [each.status_code for each in answers(asked).values()] == [200, 200, 400]


KNOWN = {"web": "w" * 32, "mlflow_sessions": "s" * 32}


def test_prefect_asks_for_the_password_that_its_clients_have_and_trusts_its_own_page_alone() -> None:
    known = prefect_variables(4201, KNOWN["web"])
    assert known["PREFECT_SERVER_API_AUTH_STRING"] == client_variables(KNOWN["web"])["PREFECT_API_AUTH_STRING"]
    assert known["PREFECT_SERVER_CORS_ALLOWED_ORIGINS"] == "http://127.0.0.1:4201,http://localhost:4201"
    assert known["RLCORE_PREFECT_HOSTS"] == "127.0.0.1,localhost"


def test_mlflow_asks_for_the_password_that_its_clients_have_and_trusts_its_own_page_alone(tmp_path: Path) -> None:
    known, has = mlflow_variables(tmp_path, 5001, KNOWN), client_variables(KNOWN["web"])
    for name in ("USERNAME", "PASSWORD"):
        assert known[f"MLFLOW_AUTH_ADMIN_{name}"] == has[f"MLFLOW_TRACKING_{name}"]
    assert known["MLFLOW_FLASK_SERVER_SECRET_KEY"] == KNOWN["mlflow_sessions"]
    assert known["MLFLOW_SERVER_ALLOWED_HOSTS"] == "127.0.0.1:5001,localhost:5001"
    assert known["MLFLOW_SERVER_CORS_ALLOWED_ORIGINS"] == "http://127.0.0.1:5001,http://localhost:5001"
    assert known["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] == "false"
    settings = Path(known["MLFLOW_AUTH_CONFIG_PATH"])
    assert settings.stat().st_mode & 0o777 == 0o600
    read = configparser.ConfigParser()
    read.read(settings)
    assert read["mlflow"]["database_uri"] == f"sqlite:///{tmp_path}/mlflow-users.db"
    assert read["mlflow"]["authorization_function"] == f"{mlflow_access.__name__}:{mlflow_access.authenticate.__name__}"
    assert not any(secret in settings.read_text() for secret in KNOWN.values())
    command = mlflow_command(5001, "--serve-artifacts")
    assert command[command.index("--app-name") + 1] == "basic-auth"


def test_mlflow_refuses_a_request_that_its_check_of_permissions_and_its_act_read_differently() -> None:
    for kind, is_refused in (("text/plain", True), (None, True), ("application/json", False)):
        with Flask("server").test_request_context(method="DELETE", data="{}", content_type=kind) as context:
            assert mlflow_access.is_ambiguous(context.request) == is_refused


def test_the_interfaces_print_one_password_and_start_both_servers_with_it(
    tracked_home: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[dict[str, tuple[list[str], dict[str, str]]]] = []
    monkeypatch.setattr(ui_servers, "run_until_interrupt", lambda commands: started.append(dict(commands)) or 0)
    monkeypatch.setattr(ui_servers, "rewrite_artifact_paths", lambda _: None)
    monkeypatch.setattr(ui_servers.signal, "signal", lambda *_: None)
    words = []
    for _ in range(2):
        assert main(["ui", "--mlflow-port", "45001", "--prefect-port", "45002"]) == 0
        words.append(capsys.readouterr().out)
    assert words[0] == words[1]  # a browser that remembers it is let in tomorrow too
    variables = {name: each[1] for name, each in started[0].items()}
    password = variables["MLflow"]["MLFLOW_AUTH_ADMIN_PASSWORD"]
    assert variables["Prefect"]["PREFECT_SERVER_API_AUTH_STRING"] == f"rlcore:{password}"
    assert password in words[0]
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


def test_a_server_of_ones_own_gets_what_its_owner_has_set(tmp_path: Path) -> None:
    assert embedded(tmp_path, PREFECT_API_URL="http://127.0.0.1:4200/api") == ["None"] * 3
    found = embedded(tmp_path, PREFECT_API_URL="http://127.0.0.1:4200/api", PREFECT_API_AUTH_STRING="me:mine")
    assert found == ["me:mine", "None", "None"]
    assert embedded(tmp_path, PREFECT_API_AUTH_STRING="me:mine")[:2] == ["me:mine", "me:mine"]


SUBJECTS = ["Prefect server", "MLflow server", "worker", "scheduler", "deployments", "dump", "disk"]


def ago(**distance: float) -> str:
    return (datetime.now(UTC) - timedelta(**distance)).isoformat()


def healthy() -> dict[str, Any]:
    """The answers of a server where everything is well, by path."""
    return {
        "work_pools/filter": [{"name": "rlcore", "type": "process"}],
        "work_pools/rlcore/workers/filter": [{"last_heartbeat_time": ago(seconds=5)}],
        "deployments/filter": [{"id": "d1", "name": "retrain", "paused": False, "schedules": [{"active": True}]}],
        "deployments/count": 3,
        "flow_runs/count": 2,
    }


class Handler(BaseHTTPRequestHandler):
    service_checks_answers: dict[str, Any]

    def do_GET(self) -> None:
        self._send({})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._send(self.answers[self.path.removeprefix("/api/")])

    def _send(self, answer: Any) -> None:
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: object) -> None: ...


@pytest.fixture
def service_checks_answers(home: Home, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The answers of a server that both addresses name; the home has two fresh dumps."""
    found = healthy()
    for name in ("1", "2"):
        (home.root / "dumps" / name).mkdir(parents=True)
    handler = type("Answering", (Handler,), {"answers": found})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setenv("PREFECT_API_URL", f"{url}/api")
        monkeypatch.setenv("MLFLOW_TRACKING_URI", url)
        yield found
        server.shutdown()


def checks(home: Home) -> dict[str, DoctorCheck]:
    return {each.subject: each for each in check_services(home)}


def test_a_healthy_installation_passes_every_check(
    home: Home, service_checks_answers: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert [(each.subject, each.state) for each in check_services(home)] == [(name, "ok") for name in SUBJECTS]
    assert main(["doctor", "--services"]) == 0
    words = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in words] == ["ok"] * len(SUBJECTS)


def test_without_servers_one_line_says_how_to_name_them(
    home: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    assert main(["doctor", "--services"]) == 1
    first, fix = capsys.readouterr().out.splitlines()
    assert first.startswith("MISSING  servers")
    assert fix.strip().endswith(f"source {home.root / 'services' / 'clients.env'}")


def test_a_server_that_does_not_answer_fails_its_checks_and_no_others(
    home: Home, service_checks_answers: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    missing = {name for name, each in checks(home).items() if each.state == "missing"}
    assert missing == {"Prefect server", "worker", "scheduler", "deployments"}


SILENT = [{"last_heartbeat_time": ago(seconds=200)}]
OFF = [{"id": "d1", "name": "retrain", "paused": True, "schedules": [{"active": True}]}]


@pytest.mark.parametrize(
    ("path", "answer", "subject", "state", "text"),
    [
        ("work_pools/rlcore/workers/filter", SILENT, "worker", "missing", "no worker of rlcore"),
        ("work_pools/rlcore/workers/filter", [], "worker", "missing", "no worker of rlcore"),
        ("work_pools/filter", [], "worker", "missing", "no pool"),
        ("flow_runs/count", 0, "scheduler", "missing", "no planned run of retrain"),
        ("deployments/filter", OFF, "scheduler", "ok", "no schedule is active"),
        ("deployments/count", 0, "deployments", "missing", "0 registered"),
    ],
)
def test_each_error_of_a_service_has_a_fix(
    home: Home, service_checks_answers: dict[str, Any], *, path: str, answer: Any, subject: str, state: str, text: str
) -> None:
    service_checks_answers[path] = answer
    found = checks(home)[subject]
    assert (found.state, text in found.text) == (state, True), found
    assert found.fix or state == "ok"


@pytest.mark.parametrize(("days", "state"), [(7.0, "ok"), (9.0, "absent")])
def test_the_age_of_the_newest_dump_is_checked(
    home: Home, service_checks_answers: dict[str, Any], days: float, state: str
) -> None:
    newest = home.root / "dumps" / "2"
    os.utime(newest, (time.time() - days * 86_400,) * 2)
    assert (checks(home)["dump"].state, checks(home)["dump"].text) == (state, f"{days} days old")
    newest.rmdir()
    (home.root / "dumps" / "1").rmdir()
    assert (checks(home)["dump"].state, checks(home)["dump"].text) == ("absent", "never made")


SLEEPER = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.fixture
def used_home(home: Home) -> Home:
    """A home that looks as if something was run there."""
    (home.root / "mlflow.db").touch()
    return home


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that somebody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_a_taken_port_is_an_error(used_home: Home, taken: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ui", "--prefect-port", str(taken), "--mlflow-port", str(free_port())]) == 2
    error = capsys.readouterr().err
    assert f"port {taken} cannot be used: Address already in use" in error
    assert f"rlcore ui --prefect-port {taken % 60000 + 1}" in error


@pytest.mark.parametrize(("port", "text"), [("5000", "both interfaces"), ("70000", "port 70000 cannot be used")])
def test_ports_that_cannot_be_are_refused(
    used_home: Home, port: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ui", "--mlflow-port", port, "--prefect-port", port if port == "5000" else str(free_port())]) == 2
    assert text in capsys.readouterr().err


def test_a_server_that_ends_by_itself_is_named_and_the_other_is_ended() -> None:
    before = {each.pid for each in psutil.Process().children()}
    with pytest.raises(ServiceError, match="the B server ended with exit code 3"):
        run_until_interrupt({"A": (SLEEPER, {}), "B": ([sys.executable, "-c", "import sys; sys.exit(3)"], {})})
    left = [each for each in psutil.Process().children() if each.pid not in before]
    assert not [each for each in left if each.status() != psutil.STATUS_ZOMBIE]


def test_ctrl_c_ends_the_servers_and_what_they_have_started() -> None:
    worker = (
        f"import subprocess, sys; print(subprocess.Popen({SLEEPER!r}).pid, flush=True); import time; time.sleep(600)"
    )
    commands = {"A": ([sys.executable, "-c", worker], {})}
    code = (
        "import sys; from rlcore.tasks.operations.ui_servers import run_until_interrupt as run; "
        f"sys.exit(run({commands!r}))"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = psutil.Process(int(process.stdout.readline()))
        threading.Timer(0.1, os.kill, (process.pid, signal.SIGINT)).start()
        assert process.wait(LONG) == 0
    until_ended([child.pid])  # a killed process takes a moment to be gone
