"""Real servers in a folder of their own, and runs of deployments on them: what the tests marked `services` share."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from tests.waiting import LONG

ROOT = Path(__file__).resolve().parents[2]
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))

_FROM_THE_TEST_RUN = ("PREFECT_", "MLFLOW_", "RLCORE_", "MAKE", "MFLAGS")  # what commands must not inherit

# The micro run's sizes, with more iterations: time to be killed in.
SMALL = (
    "hardware.num_threads=1",
    "data.prompts.num_train=200",
    "data.prompts.num_eval=40",
    "data.demonstrations.num_train=640",
    "data.demonstrations.num_eval=20",
    "data.preferences.num_train=64",
    "data.preferences.num_eval=32",
    "model.shape.hidden_size=64",
    "model.shape.num_heads=2",
    "model.shape.num_kv_heads=2",
    "model.shape.intermediate_size=128",
    "stages.sft.num_steps=40",
    "stages.reward_model.min_accuracy=0.0",
    "stages.grpo.num_iterations=12",
    "stages.grpo.prompts_per_iteration=8",
    "stages.grpo.group_size=4",
    "stages.grpo.eval_every=6",
    "stages.grpo.checkpoints.every_iterations=2",
    "stages.ppo.num_iterations=2",
    "stages.ppo.prompts_per_iteration=8",
    "stages.ppo.checkpoints.every_iterations=1",
    "evaluation.num_monitor_problems=8",
)


@dataclass(frozen=True)
class Services:
    """Services that run from ``home``; ``ports`` by name, and those where people are told."""

    home: Path
    ports: Mapping[str, int]
    webhook: int
    slack: int
    mail: int
    more: Mapping[str, str] = field(default_factory=dict)

    @property
    def root(self) -> Path:
        return self.home / "services"

    @property
    def variables(self) -> dict[str, str]:
        """The environment of the commands; nothing of the tests' own Prefect and MLflow reaches them."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(_FROM_THE_TEST_RUN)}
        ports = {f"RLCORE_{name.upper()}_PORT": str(port) for name, port in self.ports.items()}
        own = {"RLCORE_HOME": str(self.home), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        local = "127.0.0.1"
        notices = {
            "RLCORE_WEBHOOK_URL": f"http://{local}:{self.webhook}",
            "RLCORE_SLACK_URL": f"http://{local}:{self.slack}/services/T0/B0/x",
            "RLCORE_MAIL_URL": f"mailto://{local}:{self.mail}?from=rlcore@example.org&to=team@example.org",
        }
        quick = {"PREFECT_WORKER_QUERY_SECONDS": "2"}  # else a worker looks for runs every 10 s
        return kept | ports | own | notices | quick | dict(self.more)

    @property
    def clients(self) -> dict[str, str]:
        """The variables that switch from the embedded servers to these, and let a client in."""
        lines = (self.root / "clients.env").read_text().splitlines()
        return dict(line.removeprefix("export ").split("=", 1) for line in lines)

    @property
    def let_in(self) -> dict[str, str]:
        user = self.clients["PREFECT_API_AUTH_STRING"]
        return {"Authorization": f"Basic {base64.b64encode(user.encode()).decode()}"}

    def make(self, target: str) -> subprocess.CompletedProcess[str]:
        made = [part for file in (".installed", ".extra-services") for part in ("--assume-old", f".venv/{file}")]
        command = ["make", *made, f"BIN={Path(sys.executable).parent}", target]
        return subprocess.run(command, capture_output=True, text=True, env=self.variables, cwd=ROOT, check=False)

    def command(self, name: str) -> subprocess.CompletedProcess[str]:
        return self._run(["infra.services", name], self.variables)

    def rlcore(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self._run(["rlcore.flows", *arguments], self.variables)

    def deploy(self, deployment: str, *overrides: str, **parameters: str) -> subprocess.CompletedProcess[str]:
        return self._run(_submission(deployment, overrides, parameters), self._client_variables())

    def submit(self, deployment: str, *overrides: str, **parameters: Any) -> str:
        """Queue a run of a deployment as Prefect's page does; its id. What is refused raises an ``HTTPError``."""
        identifier = self.ask("prefect", f"api/deployments/name/{deployment}")["id"]
        given = {**parameters, "overrides": overrides} if overrides else parameters
        question = {"parameters": given, "state": {"type": "SCHEDULED"}}
        return str(self.ask("prefect", f"api/deployments/{identifier}/create_flow_run", question)["id"])

    def python(self, code: str, *arguments: str, served: bool = False) -> str:
        variables = self.variables | (self.clients if served else {})
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            capture_output=True,
            text=True,
            env=variables,
            cwd=ROOT,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def ask(self, service: str, path: str, question: Any = None) -> Any:
        return json.loads(self._send(service, path, question, "GET" if question is None else "POST"))

    def emit(self, event: str, **payload: str) -> None:
        resource = {"prefect.resource.id": "rlcore.test.1", "prefect.resource.name": "a test"}
        now = datetime.now(UTC).isoformat()
        sent = {"id": str(uuid.uuid4()), "occurred": now, "event": event, "resource": resource, "payload": payload}
        self._send("prefect", "api/events", [sent], "POST")

    def change(self, service: str, path: str, change: Mapping[str, Any] | None) -> None:
        self._send(service, path, change, "DELETE" if change is None else "PATCH")

    def cancel(self, run: str) -> None:
        self.ask("prefect", f"api/flow_runs/{run}/set_state", {"state": {"type": "CANCELLING"}})
        wait_until(lambda: self.flow_run(run)["state_type"] == "CANCELLED", seconds=LONG, what="cancelled")

    def log(self, service: str) -> str:
        return (self.root / "logs" / f"{service}.log").read_text()

    def flow_run(self, identifier: str) -> dict[str, Any]:
        found: dict[str, Any] = self.ask("prefect", f"api/flow_runs/{identifier}")
        return found

    def logged(self, run: str) -> str:
        question = {"logs": {"flow_run_id": {"any_": [run]}}, "sort": "TIMESTAMP_ASC"}
        return "\n".join(each["message"] for each in self.ask("prefect", "api/logs/filter", question))

    def runs_of(self, flow: str) -> list[dict[str, Any]]:
        question = {"flows": {"name": {"any_": [flow]}}, "sort": "START_TIME_ASC"}
        found: list[dict[str, Any]] = self.ask("prefect", "api/flow_runs/filter", question)
        return found

    def number(self, service: str) -> int:
        return int((self.root / f"{service}.pid").read_text())

    def kill(self, service: str) -> int:
        number = self.number(service)
        for process in [psutil.Process(number), *psutil.Process(number).children(recursive=True)]:
            process.send_signal(signal.SIGKILL)
        return number

    def flow_processes(self) -> list[psutil.Process]:
        return psutil.Process(self.number("worker")).children(recursive=True)

    def steps(self, run_id: str, metric: str = "reward/mean") -> list[int]:
        """The steps of a metric's history in MLflow: a step that was logged twice is there twice."""
        query = f"run_id={run_id}&metric_key={metric.replace('/', '%2F')}"
        found = self.ask("mlflow", f"api/2.0/mlflow/metrics/get-history?{query}")
        return [int(each["step"]) for each in found.get("metrics", [])]

    def champion(self, model: str) -> str:
        query = f"name={model}&alias=champion"
        found = self.ask("mlflow", f"api/2.0/mlflow/registered-models/alias?{query}")
        return str(found["model_version"]["version"])

    def record(self, stage: str) -> dict[str, Any]:
        (path,) = (self.home / "cache" / stage).glob("*.json")
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    def weights(self, stage: str) -> str:
        """SHA-256 of a stage's weights; its artifact as a whole has seconds in it, which no two runs share."""
        folder = self.home / self.record(stage)["ref"]["uri"] / "model"
        files = sorted(folder.glob("*.safetensors"))
        assert files
        return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()

    def forget(self, stage: str) -> None:
        """Remove a stage's records and the checkpoints of its last run, so that it is computed from its beginning."""
        for path in (self.home / "cache" / stage).glob("*.json"):
            path.unlink()
        for folder in (self.home / "checkpoints").glob(f"*/{stage}"):
            shutil.rmtree(folder)

    def _send(self, service: str, path: str, content: Any, method: str) -> bytes:
        url = f"http://127.0.0.1:{self.ports[service]}/{path}"
        data = None if content is None else json.dumps(content).encode()
        headers = {"Content-Type": "application/json", **self.let_in}
        request = urllib.request.Request(url, data=data, headers=headers, method=method)
        with _OPENER.open(request, timeout=30) as answer:
            return bytes(answer.read())

    def _client_variables(self) -> dict[str, str]:
        return self.variables | self.clients | {"PREFECT_HOME": str(self.home / "client"), "COLUMNS": "400"}

    def _run(self, module: list[str], variables: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", *module]
        return subprocess.run(command, capture_output=True, text=True, env=dict(variables), cwd=ROOT, check=False)


@contextmanager
def running_services(**more: str) -> Iterator[Services]:
    """`make services` from nothing, in a folder that PostgreSQL's user may enter; it is kept when something fails.

    ``more``: variables of the environment.
    """
    folder = Path(tempfile.mkdtemp(prefix="rlcore-services-"))
    folder.chmod(0o755)
    ports = free_ports(("postgres", "prefect", "mlflow"))
    others = free_ports(("webhook", "slack", "mail"))
    made = Services(home=folder / "home", ports=ports, more=more, **others)
    up = made.make("services")
    assert up.returncode == 0, up.stdout + up.stderr
    yield made
    down = made.command("down")
    assert down.returncode == 0, down.stdout + down.stderr
    left = [each for each in psutil.process_iter() if str(made.root) in command_of(each)]
    assert left == []
    shutil.rmtree(folder)


def command_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it has ended
        return ""


def free_ports(names: Iterable[str]) -> dict[str, int]:
    """A port for each name that nobody listens on."""
    sockets = {name: socket.socket() for name in names}
    for each in sockets.values():
        each.bind(("127.0.0.1", 0))
    ports = {name: int(each.getsockname()[1]) for name, each in sockets.items()}
    for each in sockets.values():
        each.close()
    return ports


def wait_until(holds: Callable[[], bool], *, seconds: float, what: str) -> float:
    """Seconds until ``holds``, which may fail while a server is down."""
    started = time.monotonic()
    while time.monotonic() - started < seconds:
        try:
            if holds():
                return time.monotonic() - started
        except (OSError, ValueError, psutil.Error):
            pass
        time.sleep(0.2)
    raise AssertionError(f"after {seconds:.0f} s: not {what}")


def _submission(deployment: str, overrides: tuple[str, ...], parameters: Mapping[str, str]) -> list[str]:
    given = {**parameters, **({"overrides": json.dumps(overrides)} if overrides else {})}
    options = [part for name, value in given.items() for part in ("--param", f"{name}={value}")]
    return ["prefect", "deployment", "run", deployment, *options, "--watch"]
