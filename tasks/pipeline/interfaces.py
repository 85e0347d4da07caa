"""The MLflow and Prefect user interfaces over one home, on the loopback address."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from tasks.home.settings import Home
from tasks.tracking.moved import follow_move

HOST = "127.0.0.1"


def serve(home: Home, *, mlflow_port: int, prefect_port: int) -> int:
    """Start both servers in the foreground and end both on Ctrl-C or when one of them ends; returns the exit code."""
    follow_move(home)
    mlflow = [
        *(sys.executable, "-m", "mlflow", "server", "--host", HOST, "--port", str(mlflow_port)),
        *("--backend-store-uri", home.tracking_uri, "--default-artifact-root", home.mlartifacts.as_uri()),
        *("--workers", "1"),
    ]
    prefect = [sys.executable, "-m", "prefect", "server", "start", "--host", HOST, "--port", str(prefect_port)]
    # The page in the browser asks this address, which would be the default port otherwise.
    page = {"PREFECT_SERVER_UI_API_URL": f"http://{HOST}:{prefect_port}/api"}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exit by exception ends the servers too
    servers = [_start(mlflow, {}), _start(prefect, page)]
    sys.stdout.write(
        f"MLflow:  http://{HOST}:{mlflow_port}\nPrefect: http://{HOST}:{prefect_port}\nCtrl-C ends both.\n"
    )
    sys.stdout.flush()
    try:
        while all(server.poll() is None for server in servers):
            time.sleep(0.5)
    except KeyboardInterrupt:
        return 0
    finally:
        for server in servers:
            server.terminate()
        for server in servers:
            server.wait()
    return 1


def _start(command: Sequence[str], variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, env=os.environ | dict(variables))
