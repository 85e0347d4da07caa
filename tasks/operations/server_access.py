"""Access to the Prefect and MLflow servers of rlcore: one user with a password, and pages of the same origin.

By default both serve everybody: any page in a browser on this machine could start flows, which run commands.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from rlcore.tasks.store.passwords import write_private

USER = "rlcore"
HOST = "127.0.0.1"
WEB, SESSIONS = "web", "mlflow_sessions"  # names of passwords: the user's, and the key of MLflow's forms
_NAMES = (HOST, "localhost")
_SCRIPT = Path(__file__).with_name("prefect_server.py")
_CHECK = "rlcore.tasks.tracking.mlflow_access:authenticate"
_CACHE_SECONDS = 60  # seconds for which MLflow caches a password check, which costs tens of milliseconds


def client_variables(password: str) -> dict[str, str]:
    """Return the environment variables with which Prefect's and MLflow's clients log in."""
    return {
        "PREFECT_API_AUTH_STRING": f"{USER}:{password}",
        "MLFLOW_TRACKING_USERNAME": USER,
        "MLFLOW_TRACKING_PASSWORD": password,
    }


def prefect_command(port: int) -> list[str]:
    """Return the command line of Prefect's server. ``-P``: files in this folder shadow no library."""
    return [sys.executable, "-P", str(_SCRIPT), HOST, str(port)]


def prefect_variables(port: int, password: str) -> dict[str, str]:
    """Return the environment of Prefect's server: allowed users and origins."""
    return {
        "PREFECT_SERVER_API_AUTH_STRING": f"{USER}:{password}",
        "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": ",".join(f"http://{name}:{port}" for name in _NAMES),
        "RLCORE_PREFECT_HOSTS": ",".join(_NAMES),
        # The page in the browser calls this address instead of the default port.
        "PREFECT_SERVER_UI_API_URL": f"http://{HOST}:{port}/api",
    }


def mlflow_command(port: int, *options: str) -> list[str]:
    """Return the command line of MLflow's server with password protection."""
    address = ("--host", HOST, "--port", str(port), "--workers", "1", "--uvicorn-opts", "--log-level warning")
    return [sys.executable, "-m", "mlflow", "server", *address, "--app-name", "basic-auth", *options]


def mlflow_variables(folder: Path, port: int, passwords: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of MLflow's server, which stores its users in ``folder``."""
    settings = folder / "mlflow-users.ini"
    lines = (
        "[mlflow]",
        "default_permission = READ",
        f"database_uri = sqlite:///{folder / 'mlflow-users.db'}",
        f"auth_cache_ttl_seconds = {_CACHE_SECONDS}",
        f"authorization_function = {_CHECK}",
    )
    write_private(settings, "\n".join(lines) + "\n")
    return {
        "MLFLOW_AUTH_CONFIG_PATH": str(settings),
        "MLFLOW_AUTH_ADMIN_USERNAME": USER,
        "MLFLOW_AUTH_ADMIN_PASSWORD": passwords[WEB],
        "MLFLOW_FLASK_SERVER_SECRET_KEY": passwords[SESSIONS],
        "MLFLOW_SERVER_ALLOWED_HOSTS": ",".join(f"{name}:{port}" for name in _NAMES),
        "MLFLOW_SERVER_CORS_ALLOWED_ORIGINS": ",".join(f"http://{name}:{port}" for name in _NAMES),
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # processes for scorers and traces, which are not used
    }
