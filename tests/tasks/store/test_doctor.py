from __future__ import annotations

import shutil
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from typing import ClassVar

import pytest
from packaging.requirements import Requirement

from rlcore.config import HardwareConfig
from rlcore.extras import install_command
from rlcore.flows.cli.app import main
from rlcore.tasks.store import doctor
from rlcore.tasks.store.doctor import GIB, DoctorCheck, lines
from rlcore.tasks.store.settings import Home


class Healthy(BaseHTTPRequestHandler):
    """A server that is well below ``/api``, and nowhere else, and lets the user in whose password is ``p``."""

    clients: ClassVar[set[str | None]] = set()  # the proxy's header of the requests

    def do_GET(self) -> None:
        self.clients.add(self.headers["X-Client"])
        known = {"/api/health": 200, "/api/version": 200 if self.headers["Authorization"] == "Basic dTpw" else 401}
        self.send_response(known.get(self.path, 503))
        self.end_headers()

    def log_message(self, *args: object) -> None: ...


@pytest.fixture
def served() -> Iterator[str]:
    """Its address."""
    with HTTPServer(("127.0.0.1", 0), Healthy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def unserved() -> str:
    """An address where nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


def test_the_command_says_every_finding_and_its_exit_code_is_that_of_the_faults(
    home: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        doctor, "sandbox", lambda: DoctorCheck(subject="sandbox", state="absent", text="none", fix="get one")
    )
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    subjects = ("python", "packages", "device", "cores", "memory", "disk", "flow engine", "Prefect server")
    assert [
        each for each in (*subjects, "MLflow server", "sandbox", "rollout engines", "extras") if each not in said
    ] == []
    assert said.endswith("the demo can run: rlcore run\n")

    monkeypatch.setenv("RLCORE_ENGINE", "none")
    assert main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert "MISSING  flow engine         unknown engine 'none'" in said
    assert said.endswith("1 of these keep the demo from running\n")


def test_a_finding_says_what_to_do_only_where_something_is_missing() -> None:
    assert (
        lines(DoctorCheck(subject="x", state="ok", text="here", fix="nothing")) == "ok       x                   here"
    )
    said = lines(DoctorCheck(subject="x", state="absent", text="not here", fix="get it"))
    assert said.splitlines() == ["-        x                   not here", " " * 29 + "get it"]


def test_a_missing_and_an_old_library_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.packages().state == "ok"
    monkeypatch.setattr(doctor, "requirements", lambda *_: [Requirement("no-such-library>=1"), Requirement("numpy<1")])
    found = doctor.packages()
    assert found.state == "missing"
    assert found.text.startswith("no-such-library is missing; numpy is ")
    assert found.text.endswith(", not <1")
    assert found.fix.startswith("make ")

    monkeypatch.setattr(doctor, "make_command", lambda _: "")  # not a checkout
    assert doctor.packages().fix == install_command("pipeline")
    extras = doctor.extras()
    assert (extras.state, "make" in extras.fix) == ("absent", False)
    assert extras.fix.endswith(install_command("gguf"))


def test_a_card_that_is_not_there_is_a_fault_and_a_cpu_is_none() -> None:
    assert doctor.device(HardwareConfig(device="cuda")).state == "missing"
    assert doctor.device().text.startswith("device=cpu precision=float32 instructions=")


def test_too_little_memory_or_disk_is_a_fault(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    for free, state in ((GIB // 2, "missing"), (8 * GIB, "ok")):
        monkeypatch.setattr("rlcore.hardware.memory.free_bytes", lambda _, free=free: free)
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: SimpleNamespace(free=free))
        assert (doctor.memory().state, doctor.disk(home).state) == (state, state)


def test_a_server_answers_or_is_a_fault_and_without_one_it_is_the_embedded(
    served: str, unserved: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "u:p")
    monkeypatch.setenv("PREFECT_CLIENT_CUSTOM_HEADERS", '{"X-Client": "t"}')
    Healthy.clients.clear()
    for url, state in ((f"{served}/api", "ok"), (served, "missing"), (unserved, "missing"), ("http://[", "missing")):
        monkeypatch.setenv("PREFECT_API_URL", url)
        assert doctor.server("Prefect", "PREFECT_API_URL", "embedded").state == state
    assert Healthy.clients == {"t"}
    monkeypatch.setenv("PREFECT_API_URL", f"{served}/api")
    assert doctor.server("Prefect", "PREFECT_API_URL", "").text == f"{served}/api answers 200 to the user u"
    monkeypatch.delenv("PREFECT_API_URL")
    assert doctor.server("Prefect", "PREFECT_API_URL", "embedded").text == "embedded"


def test_a_server_that_asks_for_another_password_is_a_fault_that_says_where_it_stands(
    served: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", f"{served}/api")
    for known, whom in {"": "us", "u:old": "the user u"}.items():
        monkeypatch.setenv("PREFECT_API_AUTH_STRING", known)
        found = doctor.server("Prefect", "PREFECT_API_URL", "embedded")
        assert (found.state, f"does not let {whom} in (401)" in found.text) == ("missing", True)
        assert "clients.env" in found.fix


def test_without_bubblewrap_the_sandbox_is_absent_and_the_demo_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    found = doctor.sandbox()
    assert (found.state, "bubblewrap is not installed" in found.text) == ("absent", True)
    assert "apt-get install bubblewrap" in found.fix


def test_an_environment_in_which_a_library_cannot_be_imported_is_a_fault_and_no_traceback(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> DoctorCheck:
        raise ImportError("no module named torch")

    monkeypatch.setattr(doctor, "device", fail)
    faults = [each.text for each in doctor.run_checks(home) if each.state == "missing"]
    assert faults == ["no module named torch"]
