"""``rlcore doctor --services`` against a server whose answers the test writes; a real one is in tests/integration."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rlcore.flows.cli.app import main
from rlcore.tasks.operations.service_checks import check_services
from rlcore.tasks.store.doctor import DoctorCheck
from rlcore.tasks.store.settings import Home

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
    answers: dict[str, Any]

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
def answers(home: Home, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
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
    home: Home, answers: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert [(each.subject, each.state) for each in check_services(home)] == [(name, "ok") for name in SUBJECTS]
    assert main(["doctor", "--services"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in said] == ["ok"] * len(SUBJECTS)


def test_without_servers_one_line_says_how_to_name_them(
    home: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    assert main(["doctor", "--services"]) == 1
    first, fix = capsys.readouterr().out.splitlines()
    assert first.startswith("MISSING  servers")
    assert fix.strip().endswith(f"source {home.root / 'services' / 'clients.env'}")


def test_a_server_that_does_not_answer_fails_its_checks_and_no_others(
    home: Home, answers: dict[str, Any], monkeypatch: pytest.MonkeyPatch
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
def test_what_is_wrong_is_said_with_a_fix(
    home: Home, answers: dict[str, Any], *, path: str, answer: Any, subject: str, state: str, text: str
) -> None:
    answers[path] = answer
    found = checks(home)[subject]
    assert (found.state, text in found.text) == (state, True), found
    assert found.fix


@pytest.mark.parametrize(("days", "state"), [(7.0, "ok"), (9.0, "absent")])
def test_the_age_of_the_newest_dump_is_checked(home: Home, answers: dict[str, Any], days: float, state: str) -> None:
    newest = home.root / "dumps" / "2"
    os.utime(newest, (time.time() - days * 86_400,) * 2)
    assert (checks(home)["dump"].state, checks(home)["dump"].text) == (state, f"{days} days old")
    newest.rmdir()
    (home.root / "dumps" / "1").rmdir()
    assert (checks(home)["dump"].state, checks(home)["dump"].text) == ("absent", "never made")


def test_a_worker_without_a_state_directory_has_no_dump(tmp_path: Path, answers: dict[str, Any]) -> None:
    assert checks(Home(tmp_path / "nowhere"))["dump"].state == "absent"
