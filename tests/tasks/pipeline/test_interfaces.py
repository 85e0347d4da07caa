"""The two servers of the user interfaces end together."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from tasks.home.settings import Home
from tasks.pipeline import interfaces

Started = list[tuple[list[str], dict[str, str], "subprocess.Popen[bytes]"]]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[Started]:
    """What is started, in whose place stand processes that sleep: each server takes ten seconds to come up."""
    found: Started = []

    def start(command: Sequence[str], variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        found.append((list(command), dict(variables), process))
        return process

    monkeypatch.setattr(interfaces, "_start", start)
    before = signal.getsignal(signal.SIGTERM)
    yield found
    signal.signal(signal.SIGTERM, before)
    for _, _, process in found:
        process.kill()
        process.wait()


def end_one(started: Started) -> None:
    process = started[1][2]
    process.terminate()
    process.wait()


def interrupt(_: Started) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(("act", "code"), [(end_one, 1), (interrupt, 0)])
def test_both_servers_end_when_one_ends_or_on_ctrl_c(
    act: Callable[[Started], None],
    code: int,
    started: Started,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(interfaces, "time", SimpleNamespace(sleep=lambda _: act(started)))
    assert interfaces.serve(Home(tmp_path), mlflow_port=5001, prefect_port=4201) == code
    assert [process.poll() is None for _, _, process in started] == [False, False]
    assert "MLflow:  http://127.0.0.1:5001\nPrefect: http://127.0.0.1:4201\n" in capsys.readouterr().out


def test_both_listen_on_the_loopback_address_over_this_home(
    started: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interfaces, "time", SimpleNamespace(sleep=lambda _: end_one(started)))
    interfaces.serve(Home(tmp_path), mlflow_port=5001, prefect_port=4201)
    (mlflow, _, _), (prefect, variables, _) = started
    for command, port in ((mlflow, "5001"), (prefect, "4201")):
        assert command[command.index("--host") + 1] == "127.0.0.1"
        assert command[command.index("--port") + 1] == port
    assert mlflow[mlflow.index("--backend-store-uri") + 1] == Home(tmp_path).tracking_uri
    assert variables == {"PREFECT_SERVER_UI_API_URL": "http://127.0.0.1:4201/api"}
