"""The MLflow and Prefect user interfaces over one home, on the loopback address."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence

from tasks.settings import Home

HOST = "127.0.0.1"


def serve(home: Home, *, mlflow_port: int, prefect_port: int) -> int:
    """Start both servers in the foreground and end both on Ctrl-C or when one of them ends; returns the exit code."""
    mlflow = [
        *(sys.executable, "-m", "mlflow", "server", "--host", HOST, "--port", str(mlflow_port)),
        *("--backend-store-uri", home.tracking_uri, "--default-artifact-root", home.mlartifacts.as_uri()),
        *("--workers", "1"),
    ]
    prefect = [sys.executable, "-m", "prefect", "server", "start", "--host", HOST, "--port", str(prefect_port)]
    servers = [_start(mlflow), _start(prefect)]
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


def _start(command: Sequence[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command)
