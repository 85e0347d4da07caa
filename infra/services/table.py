"""Services as rows: how each is started, checked, and ended."""

from __future__ import annotations

import base64
import json
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from infra.services import postgres
from infra.services.layout import POOL, Layout, passwords
from rlcore.tasks.operations.server_access import USER, WEB, mlflow_command, prefect_command

WORKER = "worker"
_SECONDS = 30.0  # to wait for an answer, on a busy machine; one that does not listen refuses at once
_WORKER_SILENCE = 90.0  # seconds; a worker sends a heartbeat every 30
# An address of this machine needs no proxy.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _no_arguments() -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True, kw_only=True)
class Service:
    """One process. ``needs`` are ready before it starts; ``identity`` are arguments of ``subprocess.Popen``."""

    name: str
    command: Callable[[Layout], list[str]]
    is_ready: Callable[[Layout], bool]
    needs: tuple[str, ...] = ()
    identity: Callable[[], Mapping[str, Any]] = _no_arguments
    end: signal.Signals = signal.SIGTERM


def _prefect_command(layout: Layout) -> list[str]:
    return prefect_command(layout.ports["prefect"])


def _prefect_is_ready(layout: Layout) -> bool:
    return ask(layout, "prefect", "api/ready") is not None  # also queries the database


def _mlflow_command(layout: Layout) -> list[str]:
    # The database and the folder of files are in the environment.
    return mlflow_command(layout.ports["mlflow"], "--serve-artifacts")


def _mlflow_is_ready(layout: Layout) -> bool:
    # A page that reads the database; /health answers without one.
    question = {"max_results": 1}
    return ask(layout, "mlflow", "api/2.0/mlflow/experiments/search", question) is not None


def _worker_command(layout: Layout) -> list[str]:
    return [sys.executable, "-m", "infra.worker", "--type", "process", "--name", "local"]


def _worker_is_ready(layout: Layout) -> bool:
    workers = ask(layout, "prefect", f"api/work_pools/{POOL}/workers/filter", {})
    return any(_has_heartbeat(worker) for worker in workers or [])


def _has_heartbeat(worker: Mapping[str, Any]) -> bool:
    heard = datetime.fromisoformat(worker["last_heartbeat_time"])
    return worker["status"] == "ONLINE" and (datetime.now(UTC) - heard).total_seconds() < _WORKER_SILENCE


def ask(layout: Layout, service: str, path: str, question: Mapping[str, Any] | None = None) -> Any:
    """Return a server's JSON answer, or None if it does not answer."""
    data = None if question is None else json.dumps(question).encode()
    try:
        user = base64.b64encode(f"{USER}:{passwords(layout)[WEB]}".encode()).decode()
        headers = {"Content-Type": "application/json", "Authorization": f"Basic {user}"}
        request = urllib.request.Request(f"{layout.url(service)}/{path}", data=data, headers=headers)
        with _OPENER.open(request, timeout=_SECONDS) as answer:
            return json.loads(answer.read())
    except (urllib.error.URLError, OSError, ValueError):
        return None


SERVICES = (
    Service(
        name="postgres",
        command=postgres.command,
        is_ready=postgres.is_ready,
        identity=postgres.identity,
        end=signal.SIGINT,  # "fast": it does not wait for clients to leave
    ),
    Service(name="prefect", command=_prefect_command, is_ready=_prefect_is_ready, needs=("postgres",)),
    Service(name="mlflow", command=_mlflow_command, is_ready=_mlflow_is_ready, needs=("postgres",)),
    Service(name=WORKER, command=_worker_command, is_ready=_worker_is_ready, needs=("prefect", "mlflow")),
)
