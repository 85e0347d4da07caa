"""Servers that a test starts, asks over HTTP, and ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.waiting import LONG, until

ROOT = Path(__file__).resolve().parents[1]
SERVE = """
import sys
from rlcore.tasks.store.settings import configure_environment, find_home
from rlcore.tasks.serving.serve import serve_model
configure_environment(find_home())
port, engine, python = sys.argv[1:]
sys.exit(serve_model(find_home(), "toy-sft/1", port=int(port), engine=engine, python=python))
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until_it_listens(port: int) -> None:
    """Return when something on this machine listens at a port."""

    def listens() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    until(listens, f"a listener at port {port}")


@contextmanager
def running(command: Sequence[str], port: int, path: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A server that answers at ``path``; it is ended by SIGTERM."""
    paths = {  # MLflow asks the shell for uvicorn, which lies beside its own interpreter
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        "PATH": os.pathsep.join((str(Path(command[0]).parent), os.environ["PATH"])),
    }
    with log.open("wb") as output:
        server = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | paths,
            cwd=log.parent,
            start_new_session=True,
        )
    try:
        while not answers(f"http://127.0.0.1:{port}{path}"):
            assert server.poll() is None, log.read_text()
            time.sleep(0.05)
        yield server
    finally:
        server.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            server.wait(60)
        with suppress(ProcessLookupError):  # MLflow's ends without its workers
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def answers(url: str, token: str = "") -> bool:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=_let_in(token)), timeout=5):
            return True
    except OSError:
        return False


def ask(url: str, body: dict[str, Any], token: str = "") -> Any:
    headers = {"Content-Type": "application/json", **_let_in(token)}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=LONG) as answer:
        return json.load(answer)


def _let_in(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"} if token else {}
