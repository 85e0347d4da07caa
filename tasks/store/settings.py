"""The state folder, and the environment that Prefect and MLflow need before they are imported.

This module imports neither: both read their settings when they are imported, so it has to come first.
"""

from __future__ import annotations

import logging
import os
import stat
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

from rlcore.errors import ConfigError, StorageError
from rlcore.tasks.store.logs import shorten_user_errors
from rlcore.tasks.store.passwords import draw, private_file
from rlcore.tasks.store.scratch import remove_left
from rlcore.tasks.store.state import require_readable

Engine = Literal["prefect", "inline"]

# Nothing calls home, results are JSON, nothing is unpickled, and a slow machine may take its time to start the API.
_DEFAULTS = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "true",
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "180",
    "PREFECT_RESULTS_DEFAULT_SERIALIZER": "json",
    "PREFECT_LOGGING_EXTRA_LOGGERS": "rlcore",  # our progress lines stand on the flow run's page
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",  # the same lines outside of a flow run
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",  # a new database tells of its tables
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false",
    "GIT_PYTHON_REFRESH": "quiet",  # MLflow's git library complains on machines without git
}
_PRIVATE = 0o700
_NOWHERE = "http://nobody.invalid"  # no page has this origin, and the embedded server shows none of its own


@dataclass(frozen=True)
class Home:
    """The folder that holds all state; it may be moved or copied while nothing runs, and a copy is a home of its own.

    ``artifacts/`` results of stages, ``cache/`` which key gave which result, ``pages/`` pages and plots of results,
    ``work/`` unfinished stages, ``leases/`` runs that are alive, ``past/`` how a champion's data looked, read from
    MLflow, ``versions.json`` what wrote all this, ``backups/`` databases as they were before an upgrade, ``prefect/``
    and ``mlflow.db`` + ``mlartifacts/`` the two tools' own state.
    """

    root: Path

    @property
    def artifacts(self) -> Path:
        return self.root / "artifacts"

    @property
    def cache(self) -> Path:
        return self.root / "cache"

    @property
    def work(self) -> Path:
        return self.root / "work"

    @property
    def leases(self) -> Path:
        return self.root / "leases"

    @property
    def pages(self) -> Path:
        return self.root / "pages"

    @property
    def past(self) -> Path:
        return self.root / "past"

    @property
    def prefect(self) -> Path:
        return self.root / "prefect"

    @property
    def mlartifacts(self) -> Path:
        return self.root / "mlartifacts"

    @property
    def tracking_uri(self) -> str:
        """The URI of MLflow's runs unless ``MLFLOW_TRACKING_URI`` names another."""
        return f"sqlite:///{self.root / 'mlflow.db'}"


def find_home() -> Home:
    """The home named by ``RLCORE_HOME``, else ``.rlcore/`` below the current directory."""
    return Home(Path(os.environ.get("RLCORE_HOME") or ".rlcore").absolute())


def configure_environment(home: Home) -> None:
    """Make the home's folders, for their owner alone, and set what Prefect and MLflow read.

    What the user has set already stays. What commands that were killed have left goes.

    Raises:
        StorageError: the home cannot be made or written, or other versions wrote what lies there.
    """
    prepare_environment(home)
    require_readable(home)


def prepare_environment(home: Home) -> None:
    """:func:`configure_environment` for what may be in an older state.

    Raises:
        StorageError: the home cannot be made or written.
    """
    _make_writable(home)
    remove_left(home.work)
    os.environ["RLCORE_HOME"] = str(home.root)  # for processes that this one starts
    placed = {
        "PREFECT_HOME": str(home.prefect),
        # Prefect looks for this file in ~/.prefect, whatever its home is.
        "PREFECT_SERVER_MEMO_STORE_PATH": str(home.prefect / "memo_store.toml"),
        "MLFLOW_TRACKING_URI": home.tracking_uri,
    }
    for name, value in (_DEFAULTS | placed | _embedded_access()).items():
        os.environ.setdefault(name, value)


def _embedded_access() -> dict[str, str]:
    """Draw the password that lets this process, and no page in a browser, into its embedded Prefect server."""
    names = ("PREFECT_API_AUTH_STRING", "PREFECT_SERVER_API_AUTH_STRING")
    if os.environ.get("PREFECT_API_URL"):
        return {}  # a server of somebody's own, who says how to be let in
    known = next((os.environ[name] for name in names if os.environ.get(name)), "") or f"rlcore:{draw()}"
    return dict.fromkeys(names, known) | {"PREFECT_SERVER_CORS_ALLOWED_ORIGINS": _NOWHERE}


def engine_name() -> Engine:
    """Return the engine of the flows: ``RLCORE_ENGINE``, or ``prefect`` if it is not set.

    Raises:
        ConfigError: an unknown engine.
    """
    name = os.environ.get("RLCORE_ENGINE") or "prefect"
    if name in get_args(Engine):
        return cast(Engine, name)
    raise ConfigError(f"unknown engine {name!r}", where="RLCORE_ENGINE", fix="set it to 'prefect' or 'inline'")


def configure_logging() -> None:
    """Show one plain line per stage on standard error; under Prefect its own handlers do, beside the API."""
    shorten_user_errors()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # MLflow imports it, and it misses what nobody uses
    logger = logging.getLogger("rlcore")
    logger.setLevel(logging.INFO)
    if engine_name() == "inline" and not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
        logger.addHandler(handler)
        logger.propagate = False


def _make_writable(home: Home) -> None:
    try:
        home.root.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
        for folder in _folders(home):
            folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=home.root) as probe:
            probe.write(b"0")
        _tighten(home)
    except OSError as error:
        raise StorageError(
            f"the state folder cannot be written: {error.strerror}",
            where=str(home.root),
            fix="set RLCORE_HOME to a folder on a disk with space that you may write",
        ) from error


def _tighten(home: Home) -> None:
    """Let the owner alone into the home, and read its databases: they hold what models wrote, and passwords.

    A volume that belongs to somebody else, such as the platform that mounts it, stays as that has made it. Where
    PostgreSQL runs in the home as a user of its own, others may pass through it and see nothing of it.
    """
    private_file(home.prefect / "prefect.db")  # Prefect's server would make it for everybody
    for path in (home.root, *_folders(home), *home.root.glob("*.db"), *home.root.glob("*/*.db")):
        mode = path.stat().st_mode
        allowed = _PRIVATE | stat.S_IXOTH if path == home.root and _is_passed(home) else _PRIVATE
        if mode & 0o077 & ~allowed and not mode & stat.S_ISVTX:  # such as /tmp, which is everybody's
            with suppress(PermissionError):
                path.chmod(mode & allowed)


def _folders(home: Home) -> tuple[Path, ...]:
    return (home.artifacts, home.cache, home.work, home.leases, home.prefect, home.mlartifacts)


def _is_passed(home: Home) -> bool:
    """True if a cluster of ``make services`` lies in the home that belongs to another user than the home does."""
    cluster = home.root / "services" / "postgres"
    return cluster.exists() and cluster.stat().st_uid != home.root.stat().st_uid
