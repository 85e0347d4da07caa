from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import psutil
import pytest

from rlcore.errors import ServiceError
from rlcore.flows.cli.app import main
from rlcore.tasks.operations.ui_servers import run_until_interrupt
from rlcore.tasks.store.settings import Home
from tests.http_servers import free_port
from tests.waiting import LONG, until_ended

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


def test_a_taken_port_is_said_at_once_with_the_option_that_sets_another(
    used_home: Home, taken: int, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_where_nothing_was_run_that_is_said(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ui"]) == 1
    error = capsys.readouterr().err
    assert "nothing was run here yet" in error
    assert str(home.root) in error
    assert "rlcore run" in error


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
