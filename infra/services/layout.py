"""State folders, ports and environments of the services."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from rlcore.errors import ConfigError, StorageError
from rlcore.tasks.operations.postgres import FOLDER, services_folder
from rlcore.tasks.operations.server_access import (
    HOST,
    SESSIONS,
    WEB,
    client_variables,
    mlflow_variables,
    prefect_variables,
)
from rlcore.tasks.store.passwords import passwords as drawn
from rlcore.tasks.store.passwords import write_private

POOL, QUEUE = "rlcore", "gpu"
MARK = "RLCORE_STARTED_BY"  # in the environment of all child processes, by which a stop finds them
CODE = Path(__file__).resolve().parents[2]
_NAMES = ("postgres", "prefect", "mlflow", WEB, SESSIONS)  # PostgreSQL's roles, and the web interfaces
_PORTS = {"postgres": 5442, "prefect": 4200, "mlflow": 5000}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Set of services: ``root`` has all of their state, ``home`` is the state directory of their runs."""

    root: Path
    home: Path
    ports: Mapping[str, int]

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def artifacts(self) -> Path:
        """Files of MLflow's runs, behind its server."""
        return self.root / "mlflow-artifacts"

    @property
    def destination(self) -> str:
        """Location of those files: the user's (``s3://…``), else :attr:`artifacts`."""
        return os.environ.get("MLFLOW_ARTIFACTS_DESTINATION") or self.artifacts.as_uri()

    @property
    def cluster(self) -> Path:
        return self.root / "postgres"

    def log(self, service: str) -> Path:
        return self.logs / f"{service}.log"

    def url(self, service: str) -> str:
        """Return ``http://127.0.0.1:<port>`` of ``prefect`` or ``mlflow``."""
        return f"http://{HOST}:{self.ports[service]}"

    @property
    def client_file(self) -> Path:
        """Shell file with addresses and password of these servers, for its owner alone."""
        return self.root / "clients.env"

    def addresses(self) -> dict[str, str]:
        """Return the variables that replace the embedded servers by these."""
        return {"PREFECT_API_URL": f"{self.url('prefect')}/api", "MLFLOW_TRACKING_URI": self.url("mlflow")}


def find_layout(home: Path) -> Layout:
    """Return the services' folder with the ports of those that run, else the configured ports.

    The folder is ``RLCORE_SERVICES``, else ``services/`` in the state directory. The ports are
    ``RLCORE_POSTGRES_PORT``, ``RLCORE_PREFECT_PORT`` and ``RLCORE_MLFLOW_PORT``.
    Raises:
        ConfigError: a port is invalid, or two are the same.
    """
    ports = {name: _port(f"RLCORE_{name.upper()}_PORT", default) for name, default in _PORTS.items()}
    if len(set(ports.values())) < len(ports):
        raise ConfigError(f"two services have the same port: {ports}", fix="set RLCORE_<NAME>_PORT to different ones")
    return Layout(root=services_folder(home), home=home, ports=ports)


def save_layout(layout: Layout) -> None:
    """Create the folders and save the ports for later commands."""
    try:
        layout.root.mkdir(parents=True, exist_ok=True)
        for folder in (layout.logs, layout.artifacts):
            folder.mkdir(exist_ok=True)
            folder.chmod(0o700)  # if PostgreSQL has its own user, others may traverse the folder above
        write_private(layout.root / "layout.json", json.dumps(asdict(layout), default=str), mode=0o644)
    except OSError as error:
        raise StorageError(
            f"the services' folder cannot be written: {error.strerror}", where=str(layout.root)
        ) from error


def saved_layout(layout: Layout) -> Layout:
    """Return the services as started from this folder, else ``layout``."""
    try:
        known = json.loads((layout.root / "layout.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return layout
    # Services inside a state directory belong to it, even after both were moved or copied.
    home = layout.home if layout.root.is_relative_to(layout.home) else Path(known["home"])
    return Layout(root=layout.root, home=home, ports=known["ports"])


def passwords(layout: Layout) -> Mapping[str, str]:
    """Return the passwords by name, generated once into a file for its owner alone."""
    return drawn(layout.root / "passwords.json", _NAMES)


def clients(layout: Layout) -> dict[str, str]:
    """Return the environment of a client of these servers: addresses and password."""
    return layout.addresses() | client_variables(passwords(layout)[WEB])


def write_client_file(layout: Layout) -> None:
    """Write :attr:`Layout.client_file`."""
    lines = (f"export {name}={value}\n" for name, value in clients(layout).items())
    write_private(layout.client_file, "".join(lines))


def environment(layout: Layout, service: str) -> dict[str, str]:
    """Return the environment of a service's process.

    A password is in its user's environment, never in a command line, which everybody can read.
    """
    shared = os.environ | layout.addresses() | _shared(layout)
    if service == "postgres":
        return shared
    if service == "prefect":
        return shared | _prefect(layout)
    if service == "mlflow":
        return shared | _mlflow(layout)
    return shared | clients(layout)


def _shared(layout: Layout) -> dict[str, str]:
    return {
        MARK: str(layout.root),
        FOLDER: str(layout.root),
        "RLCORE_HOME": str(layout.home),
        "RLCORE_CODE": str(CODE),
        "RLCORE_ENGINE": "prefect",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(CODE), os.environ.get("PYTHONPATH", "")))),
        "PREFECT_HOME": str(layout.root / "prefect"),
        "PREFECT_SERVER_MEMO_STORE_PATH": str(layout.root / "prefect" / "memo_store.toml"),
        # A server or database that is back within three minutes costs a run nothing.
        "PREFECT_CLIENT_MAX_RETRIES": "8",
        "PREFECT_CLIENT_RETRY_EXTRA_CODES": "500",
    }


def _prefect(layout: Layout) -> dict[str, str]:
    return prefect_variables(layout.ports["prefect"], passwords(layout)[WEB]) | {
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": database(layout, "prefect", "postgresql+asyncpg"),
        "PREFECT_SERVER_DATABASE_TIMEOUT": "60",  # seconds; after its default of 10 a busy machine's pages show errors
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
        "PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED": "events,flow_runs",  # flow runs go after 90 days, events after 30
        "PREFECT_SERVER_SERVICES_DB_VACUUM_RETENTION_PERIOD": "7776000",
        "PREFECT_SERVER_EVENTS_RETENTION_PERIOD": "P30D",
    }


def _mlflow(layout: Layout) -> dict[str, str]:
    return mlflow_variables(layout.root, layout.ports["mlflow"], passwords(layout)) | {
        "MLFLOW_BACKEND_STORE_URI": database(layout, "mlflow", "postgresql+psycopg2"),
        "MLFLOW_ARTIFACTS_DESTINATION": layout.destination,
    }


def database(layout: Layout, name: str, driver: str) -> str:
    """Return a database address with its password: for an environment, never for a command line or log."""
    return f"{driver}://{name}:{passwords(layout)[name]}@{HOST}:{layout.ports['postgres']}/{name}"


def _port(variable: str, default: int) -> int:
    text = os.environ.get(variable) or str(default)
    if not (text.isdecimal() and 0 < int(text) < 65536):
        raise ConfigError(f"{text!r} is no port", where=variable, fix="give a number from 1 to 65535")
    return int(text)
