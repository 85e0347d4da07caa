"""MLflow and Prefect user interfaces of a state directory, on the loopback address."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlcore.errors import ConfigError, ServiceError, StorageError
from rlcore.tasks.operations.server_access import (
    HOST,
    SESSIONS,
    USER,
    WEB,
    mlflow_command,
    mlflow_variables,
    prefect_command,
    prefect_variables,
)
from rlcore.tasks.store.passwords import passwords
from rlcore.tasks.store.settings import Home
from rlcore.tasks.tracking.database import rewrite_artifact_paths
from rlcore.tasks.tracking.runs import results_page

_QUIET = {"MLFLOW_LOGGING_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore"}  # what they warn of is not the user's
_PATIENCE = 5.0  # seconds between terminating a server and killing it


def serve(home: Home, *, mlflow_port: int, prefect_port: int) -> int:
    """Start both servers in the foreground; end both on Ctrl-C and return the exit code.

    Raises:
        StorageError: no command has run in this state directory yet.
        ConfigError: a port is taken, or both are the same.
        ServiceError: one of the servers ended by itself.
    """
    _require_results(home)
    rewrite_artifact_paths(home)
    _require_free(mlflow_port, prefect_port)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exit by exception ends the servers too
    known = passwords(_folder(home) / "passwords.json", (WEB, SESSIONS))
    sys.stdout.write(
        f"MLflow:  http://{HOST}:{mlflow_port}/{results_page(home)}\nPrefect: http://{HOST}:{prefect_port}\n"
        f"Both require user {USER}, password {known[WEB]} (Prefect's page in one field: {USER}:{known[WEB]})\n"
        "Ctrl-C ends both.\n"
    )
    sys.stdout.flush()
    return run_until_interrupt(_servers(home, known, mlflow_port=mlflow_port, prefect_port=prefect_port))


def _servers(
    home: Home, known: Mapping[str, str], *, mlflow_port: int, prefect_port: int
) -> dict[str, tuple[Sequence[str], Mapping[str, str]]]:
    uri = home.tracking_uri
    stores = ("--backend-store-uri", uri, "--registry-store-uri", uri)
    artifacts = ("--default-artifact-root", home.mlartifacts.as_uri())
    found = {
        "MLflow": (
            mlflow_command(mlflow_port, *stores, *artifacts),
            mlflow_variables(_folder(home), mlflow_port, known),
        ),
        "Prefect": (prefect_command(prefect_port), prefect_variables(prefect_port, known[WEB])),
    }
    return {name: (command, {**variables, **_QUIET}) for name, (command, variables) in found.items()}


def _folder(home: Home) -> Path:
    folder = home.root / "interfaces"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def run_until_interrupt(commands: Mapping[str, tuple[Sequence[str], Mapping[str, str]]]) -> int:
    """Run named commands with added environment variables until Ctrl-C. All have ended on return.

    Raises:
        ServiceError: one of them ended by itself.
    """
    servers: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name, (command, variables) in commands.items():
            # In its own session: Ctrl-C reaches only this process, which then ends the server and its workers in order.
            servers[name] = subprocess.Popen(
                command, env=os.environ | dict(variables), start_new_session=True, umask=0o077
            )
        while True:
            for name, server in servers.items():
                if server.poll() is not None:
                    raise ServiceError(
                        f"the {name} server ended with exit code {server.returncode}", fix="its own lines above say why"
                    )
            time.sleep(0.2)
    except KeyboardInterrupt:
        return 0
    finally:
        for server in servers.values():
            _end(server, signal.SIGTERM)
        for server in servers.values():
            try:
                server.wait(_PATIENCE)
            except subprocess.TimeoutExpired:
                _end(server, signal.SIGKILL)
                server.wait()


def _end(server: subprocess.Popen[bytes], number: signal.Signals) -> None:
    if server.poll() is None:
        os.killpg(server.pid, number)


def _require_results(home: Home) -> None:
    if not (home.root / "mlflow.db").is_file():
        raise StorageError(
            "nothing was run here yet, so there is nothing to look at",
            where=str(home.root),
            fix="run rlcore run, or set RLCORE_HOME to its state directory",
        )


def _require_free(mlflow_port: int, prefect_port: int) -> None:
    if mlflow_port == prefect_port:
        raise ConfigError(f"both interfaces are to be on port {mlflow_port}", fix="give each a port of its own")
    for name, port in (("mlflow", mlflow_port), ("prefect", prefect_port)):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a released port is free
            try:
                probe.bind((HOST, port))
            except (OSError, OverflowError) as error:
                raise ConfigError(
                    f"port {port} cannot be used: {getattr(error, 'strerror', None) or error}",
                    where=f"--{name}-port",
                    fix=f"rlcore ui --{name}-port {port % 60000 + 1}",
                ) from error
