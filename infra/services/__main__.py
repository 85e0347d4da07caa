"""Commands of the services: ``python -m infra.services up|down|status`` (``make services`` does ``up``)."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from infra.services import postgres
from infra.services.layout import CODE, Layout, find_layout, passwords, save_layout, saved_layout, write_client_file
from infra.services.migrate import migrate
from infra.services.provision import configure_servers, is_configured, missing, provision
from infra.services.supervisor import stop_orphans, supervise
from infra.services.table import SERVICES, WORKER
from infra.services.users import NOTHING, RIGHTS, set_user
from rlcore.errors import RlcoreError, ServiceError
from rlcore.extras import install_command
from rlcore.tasks.operations.postgres import FOLDER
from rlcore.tasks.operations.server_access import HOST, USER
from rlcore.tasks.run.events import addresses
from rlcore.tasks.store.locks import file_lock
from rlcore.tasks.store.settings import configure_environment, find_home

_START_SECONDS = 420.0  # generous, for a busy machine
_STOP_SECONDS = 180.0
_TICK = 0.5


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code."""
    asked = _parser().parse_args(arguments)
    try:
        return _run(asked.command, asked)
    except RlcoreError as error:
        sys.stderr.write(f"\nerror ({type(error).__name__}): {error}\n")
        return 1


def _run(command: str, asked: argparse.Namespace) -> int:
    home = find_home()
    layout = find_layout(home.root)
    configure_environment(home)
    if command == "up":
        sys.stdout.write(bring_up(layout))
    elif command == "down":
        sys.stdout.write(take_down(layout))
    elif command == "status":
        text, all_ready = describe(saved_layout(layout))
        sys.stdout.write(text)
        return 0 if all_ready else 1
    elif command == "supervise":
        supervise(layout)
    elif command == "migrate":
        sys.stdout.write(migrate(saved_layout(layout)))
    elif command == "user":
        sys.stdout.write(set_user(saved_layout(layout), asked.name, asked.may))
    else:
        configure_servers()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m infra.services", description="Servers of one machine.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("up", "start missing services, register the deployments, show the addresses"),
        ("down", "end everything; the next start resumes active runs"),
        ("status", "show the services; exit code 1 if one is not ready"),
        ("migrate", "copy the embedded MLflow's runs, models and files to the server"),
        ("supervise", "keep the services up in the foreground (what `up` starts in the background)"),
        ("tell", "register deployments, queue limits and automations with the server that PREFECT_API_URL names"),
    ):
        commands.add_parser(name, help=text)
    user = commands.add_parser("user", help="add a user of MLflow, or change what one may do; show the new password")
    user.add_argument("name")
    user.add_argument("--may", choices=[*RIGHTS, NOTHING], default="read", help="nothing: remove the user")
    return parser


def bring_up(layout: Layout) -> str:
    """Start and register what is missing; return a description of the services.

    Raises:
        ServiceError: a service does not start; then all are stopped.
    """
    addresses()  # a wrong one is rejected before anything starts
    if _is_supervised(layout):
        layout = saved_layout(layout)
    else:
        _start(layout)
    write_client_file(layout)
    _wait_until_ready(layout)
    return describe(layout)[0]


def take_down(layout: Layout) -> str:
    """Stop all processes of these services, including those of a killed supervisor."""
    layout = saved_layout(layout)
    if not layout.root.exists():
        return f"nothing runs from {layout.root}\n"
    number = _supervisor(layout)
    if number is not None:
        os.kill(number, signal.SIGTERM)
        limit = time.monotonic() + _STOP_SECONDS
        while _is_supervised(layout) and time.monotonic() < limit:
            time.sleep(_TICK)
        if _is_supervised(layout):
            os.kill(number, signal.SIGKILL)
    stop_orphans(layout)
    return f"the services are down; their state stays in {layout.root}\n"


def describe(layout: Layout) -> tuple[str, bool]:
    """Describe each service; also return whether all are ready and configured."""
    lines, states = [], []
    for service in SERVICES:
        states.append(service.is_ready(layout))
        number = _read_number(layout.root / f"{service.name}.pid")
        place = layout.url(service.name) if service.name in ("prefect", "mlflow") else ""
        shown = f"process {number}" if number else "no process"
        lines.append(f"{service.name:<9} {'ready' if states[-1] else 'NOT READY':<10} {shown:<16} {place}".rstrip())
    lacking = missing(layout) if all(states) else []
    states.append(not lacking)
    if lacking:
        lines.append(f"registered NOT READY  the server has {', '.join(lacking)}: run `make services`")
    lines += ["", f"source {layout.client_file}   # for a shell: addresses, user and password of Prefect and MLflow"]
    lines += [f"both pages require the user {USER} and that password (Prefect's in one field: {USER}:<password>)"]
    lines += ["", f"state, logs: {layout.root}"]
    return "\n".join(lines) + "\n", all(states)


def _start(layout: Layout) -> None:
    stop_orphans(layout)
    for name, port in layout.ports.items():
        _refuse_taken(name, port)
    _refuse_missing_driver()
    save_layout(layout)
    passwords(layout)
    postgres.make_cluster(layout)
    ports = {f"RLCORE_{name.upper()}_PORT": str(port) for name, port in layout.ports.items()}
    with layout.log("supervisor").open("ab") as log:
        subprocess.Popen(
            [sys.executable, "-m", "infra.services", "supervise"],
            cwd=CODE,
            env=os.environ | ports | {FOLDER: str(layout.root)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    limit = time.monotonic() + 60.0
    while not _is_supervised(layout):
        if time.monotonic() > limit:
            raise ServiceError("the supervisor did not start", where=str(layout.log("supervisor")), fix="read the log")
        time.sleep(_TICK)


def _wait_until_ready(layout: Layout) -> None:
    limit = time.monotonic() + _START_SECONDS
    for service in SERVICES:
        if service.name == WORKER and not is_configured(layout):
            provision(layout)  # first: the worker of an upgrade takes runs that are queued
        while not service.is_ready(layout):
            is_kept = _is_supervised(layout)
            if time.monotonic() > limit or not is_kept:
                cause = service.name if is_kept else "supervisor"  # which has stopped, and says why
                tail = _tail(layout, cause)
                take_down(layout)
                raise ServiceError(
                    f"{service.name} did not become ready, so all services were stopped; last lines:\n{tail}",
                    where=str(layout.log(cause)),
                    fix="fix the error in the log and run `make services` again",
                )
            time.sleep(_TICK)


def _tail(layout: Layout, service: str) -> str:
    log = layout.log(service)
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    return "\n".join(f"    {line}" for line in lines[-5:])


def _refuse_taken(name: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise ServiceError(
                f"port {port} of {name} is taken: {error.strerror}", fix=f"set RLCORE_{name.upper()}_PORT to a free one"
            ) from error


def _refuse_missing_driver() -> None:
    from importlib.util import find_spec

    missing = [name for name in ("asyncpg", "psycopg2") if find_spec(name) is None]
    if missing:
        raise ServiceError(f"no driver for PostgreSQL: {', '.join(missing)}", fix=install_command("services"))


def _is_supervised(layout: Layout) -> bool:
    if not (layout.root / "supervisor.lock").exists():
        return False
    with file_lock(layout.root / "supervisor.lock", wait=False) as free:
        return not free


def _supervisor(layout: Layout) -> int | None:
    number = _read_number(layout.root / "supervisor.pid")
    return number if number and _is_supervised(layout) and psutil.pid_exists(number) else None


def _read_number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


if __name__ == "__main__":
    sys.exit(main())
