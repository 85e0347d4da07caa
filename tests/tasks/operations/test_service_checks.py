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
from rlcore.tasks.operations import service_checks
from rlcore.tasks.operations.service_checks import ServiceCheck, check_services, daily_growth
from rlcore.tasks.store.audit_log import audit_path, record_action
from rlcore.tasks.store.settings import Home
from rlcore.tasks.store.storage import write_json

SUBJECTS = [
    "Prefect server", "MLflow server", "worker", "scheduler", "late runs", "queue wait", "retraining", "automations",
    "backup", "disk", "audit log",
]  # fmt: skip


def ago(**distance: float) -> str:
    return (datetime.now(UTC) - timedelta(**distance)).isoformat()


def healthy() -> dict[str, Any]:
    """The answers of a server where everything is well, by path; a function has the question."""
    nightly = {"id": "d1", "name": "retrain", "paused": False, "schedules": [{"active": True, "updated": ago(days=40)}]}

    def runs(question: dict[str, Any]) -> Any:
        filters = question.get("flow_runs", {})
        if "expected_start_time" in filters:  # the planned ones
            return [{"expected_start_time": ago(days=-1)}, {"expected_start_time": ago(days=-2)}][: question["limit"]]
        return [{"end_time": ago(hours=5)}] if "flows" in question else []

    return {
        "work_pools/filter": [{"name": "rlcore", "type": "process"}],
        "work_pools/rlcore/workers/filter": [{"last_heartbeat_time": ago(seconds=5)}],
        "deployments/filter": [nightly],
        "flow_runs/filter": runs,
        "flow_runs/count": 0,
        "events/filter": {"total": 0},
    }


class Handler(BaseHTTPRequestHandler):
    answers: dict[str, Any]

    def do_GET(self) -> None:
        self._send({})

    def do_POST(self) -> None:
        found = self.answers[self.path.removeprefix("/api/")]
        question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._send(found(question) if callable(found) else found)

    def _send(self, answer: Any) -> None:
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: object) -> None: ...


@pytest.fixture
def answers(home: Home, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The answers of a server that both addresses name; the home has a fresh backup."""
    found = healthy()
    write_json({"time": ago(hours=3), "target": "/backups", "bytes": 1}, home.root / "backups" / "last.json")
    handler = type("Answering", (Handler,), {"answers": found})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setenv("PREFECT_API_URL", f"{url}/api")
        monkeypatch.setenv("MLFLOW_TRACKING_URI", url)
        yield found
        server.shutdown()


def checks(home: Home) -> dict[str, ServiceCheck]:
    return {each.subject: each for each in check_services(home)}


def test_a_healthy_installation_passes_every_check(
    home: Home, answers: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert [(each.subject, each.state) for each in check_services(home)] == [(name, "ok") for name in SUBJECTS]
    assert main(["doctor", "--services"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in said] == ["ok"] * len(SUBJECTS)


def test_a_restored_home_has_the_backup_that_it_came_from(
    home: Home,
    answers: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    target, elsewhere = tmp_path / "target", Home(tmp_path / "elsewhere")
    assert main(["backup", str(target)]) == 0
    monkeypatch.setenv("RLCORE_HOME", str(elsewhere.root))
    assert main(["restore", str(target)]) == 0
    last = "backups/last.json"
    assert (elsewhere.root / last).read_bytes() == (home.root / last).read_bytes()
    capsys.readouterr()
    main(["doctor", "--services"])
    assert f"ok    backup         0.0 days old, in {target}" in capsys.readouterr().out.splitlines()


def test_without_servers_one_line_says_how_to_name_them(
    home: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    assert main(["doctor", "--services"]) == 1
    first, fix = capsys.readouterr().out.splitlines()
    assert first.startswith("FAIL  servers")
    assert fix.strip().endswith(f"source {home.root / 'services' / 'clients.env'}")


def test_a_server_that_does_not_answer_fails_its_checks_and_no_others(
    home: Home, answers: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    found = checks(home)
    asked = {"Prefect server", "worker", "scheduler", "late runs", "queue wait", "retraining", "automations"}
    assert {name for name, each in found.items() if each.state == "fail"} == asked


SILENT = [{"last_heartbeat_time": ago(seconds=200)}]
LATE = [{"expected_start_time": ago(hours=3), "end_time": ago(hours=1), "name": "calm-owl"}]
OFF = [{"id": "d1", "name": "retrain", "paused": True, "schedules": [{"active": True}]}]


@pytest.mark.parametrize(
    ("path", "answer", "subject", "state", "text"),
    [
        ("work_pools/rlcore/workers/filter", SILENT, "worker", "fail", "no worker of rlcore"),
        ("work_pools/rlcore/workers/filter", [], "worker", "fail", "no worker of rlcore"),
        ("work_pools/filter", [], "worker", "fail", "no pool"),
        ("flow_runs/filter", [], "scheduler", "fail", "no planned run of retrain"),
        ("deployments/filter", OFF, "scheduler", "ok", "no schedule is active"),
        ("flow_runs/count", 3, "late runs", "warn", "3 runs"),
        ("flow_runs/count", 30, "late runs", "fail", "30 runs"),
        ("flow_runs/filter", LATE, "queue wait", "warn", " h: calm-owl"),
        ("events/filter", {"total": 2}, "automations", "fail", "2 actions failed"),
        ("deployments/filter", OFF, "retraining", "ok", "not scheduled"),
    ],
)
def test_what_is_wrong_is_said_with_a_fix(
    home: Home, answers: dict[str, Any], *, path: str, answer: Any, subject: str, state: str, text: str
) -> None:
    answers[path] = answer
    found = checks(home)[subject]
    assert (found.state, text in found.text) == (state, True), found
    assert found.fix


@pytest.mark.parametrize(("days", "state"), [(1.9, "ok"), (2.1, "warn"), (4.1, "fail")])
def test_a_nightly_retraining_that_has_not_completed_for_nights_is_noticed(
    home: Home, answers: dict[str, Any], days: float, state: str
) -> None:
    planned = answers["flow_runs/filter"]
    answers["flow_runs/filter"] = lambda asked: [{"end_time": ago(days=days)}] if "flows" in asked else planned(asked)
    assert checks(home)["retraining"].state == state
    answers["flow_runs/filter"] = lambda asked: [] if "flows" in asked else planned(asked)
    (schedule,) = answers["deployments/filter"][0]["schedules"]
    schedule["updated"] = ago(days=days)  # none has completed since it was enabled
    found = checks(home)["retraining"]
    assert (found.state, found.text.startswith("none has completed")) == (state, True)


@pytest.mark.parametrize(("days", "state"), [(1.0, "ok"), (3.0, "warn"), (9.0, "fail")])
def test_the_age_of_the_backup_is_checked(home: Home, answers: dict[str, Any], days: float, state: str) -> None:
    write_json({"time": ago(days=days), "target": "s3://b", "bytes": 1}, home.root / "backups" / "last.json")
    assert checks(home)["backup"].state == state
    (home.root / "backups" / "last.json").unlink()
    assert (checks(home)["backup"].state, checks(home)["backup"].text) == ("warn", "never made")


def old_file(path: Path, size: int, days: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"0" * size)
    os.utime(path, (time.time() - days * 86_400,) * 2)


def test_growth_is_that_of_files_of_the_last_two_weeks_each_counted_once(home: Home) -> None:
    assert daily_growth(home) == 0.0
    old_file(home.artifacts / "old" / "a", 5_000, days=100.0)
    old_file(home.artifacts / "new" / "a", 1_400, days=3.0)
    (home.mlartifacts / "same").hardlink_to(home.artifacts / "new" / "a")
    assert daily_growth(home) == pytest.approx(100.0)  # 1,400 bytes in 14 days


def test_growth_of_a_young_home_is_measured_over_its_age(home: Home) -> None:
    old_file(home.artifacts / "new" / "a", 1_000, days=2.0)
    assert daily_growth(home) == pytest.approx(500.0, rel=0.01)


@pytest.mark.parametrize(("free", "state"), [(100_000, "ok"), (10_000, "warn"), (3_000, "fail")])
def test_the_days_of_the_disk_follow_from_growth_and_room(
    home: Home, answers: dict[str, Any], monkeypatch: pytest.MonkeyPatch, free: int, state: str
) -> None:
    monkeypatch.setattr(service_checks, "daily_growth", lambda _: 500.0)
    monkeypatch.setattr(service_checks.shutil, "disk_usage", lambda _: type("Usage", (), {"free": free}))
    found = checks(home)["disk"]
    assert (found.state, found.value) == (state, free / 500.0)


def test_a_changed_entry_of_the_audit_log_fails(home: Home, answers: dict[str, Any]) -> None:
    record_action(home, "promote", "toy-grpo", {"to": "1"})
    assert checks(home)["audit log"].text == "1 entries, none was changed"
    audit_path(home).write_text(audit_path(home).read_text().replace('"to": "1"', '"to": "2"'))
    assert checks(home)["audit log"].state == "fail"


def test_a_worker_without_a_state_directory_checks_the_servers_alone(tmp_path: Path, answers: dict[str, Any]) -> None:
    assert list(checks(Home(tmp_path / "nowhere"))) == SUBJECTS[:-3]
