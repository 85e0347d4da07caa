"""State directory; the environment that Prefect and MLflow need before they are imported; errors in their logs.

This module imports neither: both read their settings on import, so it must come first.
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

from rlcore.errors import ConfigError, RlcoreError, StorageError
from rlcore.tasks.store.locks import remove_left
from rlcore.tasks.store.passwords import draw, has_secret, private_file
from rlcore.tasks.store.state import databases, require_databases, require_readable
from rlcore.tasks.store.storage import existing_parent, is_full_disk, network_file_system

Engine = Literal["prefect", "inline"]

# No telemetry, JSON results, nothing unpickled, and time for a slow machine to start the API.
_DEFAULTS = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "true",
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "180",
    "PREFECT_RESULTS_DEFAULT_SERIALIZER": "json",
    "PREFECT_LOGGING_EXTRA_LOGGERS": "rlcore",  # rlcore's progress lines appear on the flow run's page
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",  # the same lines outside of a flow run
    # A line begins with its stage; names of modules tell a user nothing.
    "PREFECT_LOGGING_FORMATTERS_STANDARD_FORMAT": "%(asctime)s.%(msecs)03d | %(levelname)-7s | %(message)s",
    # Prefect's server removes ended flow runs after 90 days, and events after 30; its own defaults: never, and 7.
    "PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED": "events,flow_runs",
    "PREFECT_SERVER_SERVICES_DB_VACUUM_RETENTION_PERIOD": "7776000",
    "PREFECT_SERVER_EVENTS_RETENTION_PERIOD": "P30D",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",  # a new database logs its tables
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # a server's client prints two lines at the end of each run
    "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false",
    "GIT_PYTHON_REFRESH": "quiet",  # MLflow's git library complains on machines without git
}
# Addresses that are stored with runs, and the variables for a password.
_ADDRESSES = {
    "MLFLOW_TRACKING_URI": "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or PGPASSWORD for a database",
    "PREFECT_API_URL": "PREFECT_API_AUTH_STRING",
}
_PRIVATE = 0o700
_placed = set[str]()  # values of PREFECT_HOME that this process has set
_STORE = "mlflow.store.db.utils"
_TASKS = "prefect.task_runs"
_PRINTED = "is_printed_by_command"  # a mark of log records
_NOWHERE = "http://nobody.invalid"  # no page has this origin, and the embedded server shows none of its own


class _Below:
    """Folder of a state directory that has the name of its attribute."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, home: Home, owner: type) -> Path:
        return home.root / self._name


@dataclass(frozen=True)
class Home:
    """State directory. It may be moved or copied while no process uses it; a copy is independent.

    ``artifacts/`` results of stages, ``cache/`` the result of each key, ``pages/`` pages and plots of results,
    ``work/`` unfinished stages, ``checkpoints/`` the last checkpoints of finished RL stages by preset and stage,
    ``leases/`` living runs, ``past/`` records of champions' data, read from MLflow,
    ``budgets/`` amounts that unfinished runs have spent, ``dumps/`` copies of all databases,
    ``versions.json`` versions that wrote the state, ``backups/`` databases before an upgrade,
    ``prefect/`` and ``mlflow.db`` + ``mlartifacts/`` the state of the two tools.
    """

    root: Path

    artifacts, cache, work, checkpoints = _Below(), _Below(), _Below(), _Below()
    leases, pages, past, mlartifacts = _Below(), _Below(), _Below(), _Below()

    @property
    def is_made(self) -> bool:
        """True if a command has run here."""
        return self.cache.is_dir()

    @property
    def prefect(self) -> Path:
        """Prefect's folder: ``PREFECT_HOME`` if the user has set it."""
        own = os.environ.get("PREFECT_HOME", "")
        return Path(own).absolute() if own and own not in _placed else self.root / "prefect"

    @property
    def source_facts(self) -> Path:
        """Memo of facts of files (:mod:`rlcore.tasks.store.remembered`), before the first run in the user's cache."""
        if self.is_made:
            return self.cache / "sources.json"
        from rlcore.sandbox.image import user_cache

        return user_cache() / "rlcore" / "sources.json"

    @property
    def tracking_uri(self) -> str:
        """URI of MLflow's runs unless ``MLFLOW_TRACKING_URI`` names another."""
        return f"sqlite:///{self.root / 'mlflow.db'}"


def find_home() -> Home:
    """Return the state directory: ``RLCORE_HOME``, else ``.rlcore/`` below the current directory."""
    return Home(Path(os.environ.get("RLCORE_HOME") or ".rlcore").absolute())


def configure_environment(home: Home) -> None:
    """Create the state directory for its owner alone, and set the environment of Prefect and MLflow.

    Settings of the user stay. Remains of killed commands are removed.
    Raises:
        StorageError: it cannot be made or written, other versions wrote it, or it has databases on a network disk.
    """
    prepare_environment(home)
    _require_local_databases(home)
    require_readable(home)


def configure_reading(home: Home) -> None:
    """Call :func:`configure_environment` if the state directory exists.

    Raises:
        StorageError: as :func:`configure_environment`.
    """
    if home.is_made:
        configure_environment(home)
    else:
        _set_variables(home)


def prepare_environment(home: Home) -> None:
    """Do as :func:`configure_environment`, also for state that needs an upgrade.

    Raises:
        StorageError: it cannot be made or written, or has lost a database.
    """
    require_databases(home.root)
    _make_writable(home)
    remove_left(home.work)
    _set_variables(home)


def _set_variables(home: Home) -> None:
    for name, instead in _ADDRESSES.items():
        if has_secret(os.environ.get(name, "")):
            raise ConfigError("the address has a password", where=name, fix=f"set it in {instead}")
    os.environ["RLCORE_HOME"] = str(home.root)  # for child processes
    if not os.environ.get("PREFECT_HOME"):
        _placed.add(str(home.prefect))
    placed = {
        "PREFECT_HOME": str(home.prefect),
        # Prefect looks for this file in ~/.prefect, whatever its home is.
        "PREFECT_SERVER_MEMO_STORE_PATH": str(home.prefect / "memo_store.toml"),
        "MLFLOW_TRACKING_URI": home.tracking_uri,
    }
    for name, value in (_DEFAULTS | placed | _embedded_access()).items():
        os.environ.setdefault(name, value)


def _embedded_access() -> dict[str, str]:
    """Generate the password that admits this process, and no page in a browser, to its embedded Prefect server."""
    names = ("PREFECT_API_AUTH_STRING", "PREFECT_SERVER_API_AUTH_STRING")
    if os.environ.get("PREFECT_API_URL"):
        return {}  # an external server, whose access the user configures
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


def use_inline_engine() -> None:
    """Let this process, and the processes that it starts, run without the Prefect API."""
    os.environ["RLCORE_ENGINE"] = "inline"


def configure_logging() -> None:
    """Show one plain line per stage on standard error; under Prefect its handlers do, besides the API."""
    shorten_user_errors()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # imported by MLflow; it warns about an unused part
    logging.getLogger("mlflow.utils.environment").setLevel(logging.ERROR)  # it warns where pip is not installed
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
        raise unwritable(home.root, error.strerror or str(error)) from error


def unwritable(root: Path, reason: str) -> StorageError:
    """Return the error of a state directory that cannot be made or written: who chose it, and whose it is."""
    source = "RLCORE_HOME names it" if os.environ.get("RLCORE_HOME") else "it is the default, below the current folder"
    there = existing_parent(root)
    try:
        owner = there.owner()
    except KeyError:  # a user without a name
        owner = f"user {there.stat().st_uid}"
    return StorageError(
        f"the state directory cannot be written: {reason}; {source}, and {there} belongs to {owner}",
        where=str(root),
        fix="set RLCORE_HOME to a folder on a disk with space that you may write",
    )


def _require_local_databases(home: Home) -> None:
    """Refuse SQLite on a network file system, which its write-ahead log does not support: databases are lost there."""
    if (found := databases(home)) and (kind := network_file_system(home.root)):
        names = " and ".join(each.tool for each in found)
        raise StorageError(
            f"the state folder is on a network file system ({kind}), where the databases of {names} break",
            where=str(home.root),
            fix="set RLCORE_HOME to a local disk, and RLCORE_STORE to share results; or use servers (make services)",
        )


def _tighten(home: Home) -> None:
    """Restrict the state directory, with its databases of completions and passwords, to its owner.

    A volume of another owner is unchanged. If PostgreSQL runs in it as another user, others may traverse it.
    """
    private_file(home.prefect / "prefect.db")  # Prefect's server would make it for everybody
    own = [path for path in home.root.iterdir() if path.is_dir() and not path.is_symlink() and path.name != "services"]
    for path in (home.root, *_folders(home), *own, *home.root.glob("*.db"), *home.root.glob("*/*.db")):
        mode = path.stat().st_mode
        allowed = _PRIVATE | stat.S_IXOTH if path == home.root and _is_passed(home) else _PRIVATE
        if mode & 0o077 & ~allowed and not mode & stat.S_ISVTX:  # such as /tmp, which is everybody's
            with suppress(PermissionError):
                path.chmod(mode & allowed)


def _folders(home: Home) -> tuple[Path, ...]:
    return (home.artifacts, home.cache, home.work, home.leases, home.prefect, home.mlartifacts)


def _is_passed(home: Home) -> bool:
    """Return True if a cluster of ``make services`` in the state directory belongs to another user."""
    cluster = home.root / "services" / "postgres"
    return cluster.exists() and cluster.stat().st_uid != home.root.stat().st_uid


class UserErrors(logging.Filter):
    """Filter that omits the traceback of rlcore's errors and of a full disk, and the end of a task that succeeded.

    Prefect logs such an error for the task and again for the flow.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        text, instead = record.getMessage(), ""
        error = record.exc_info[1] if record.exc_info else None
        if record.name == _TASKS and text.startswith("Finished in state Completed"):
            return False  # the stage logs its own end, and an iteration its metrics
        if record.name == _STORE and "database is locked" in str(error):
            return False  # its waiter reports it (rlcore.tasks.tracking.retry)
        if text.startswith("Finished in state Failed"):
            instead = text.partition("(")[0]  # the error itself is a line before
        if isinstance(error, RlcoreError):
            instead = f"{type(error).__name__}: {error}"
            setattr(record, _PRINTED, True)
        elif error is not None and is_full_disk(error):
            instead = f"the disk is full ({type(error).__name__})"
        if instead:
            record.msg, record.args, record.exc_info, record.exc_text = instead, (), None, None
        return True


_USER_ERRORS = UserErrors()


def shorten_user_errors() -> None:
    """Attach :class:`UserErrors` to the loggers of Prefect and MLflow; a second call changes nothing."""
    for name in ("prefect.flow_runs", _TASKS, _STORE):
        logging.getLogger(name).addFilter(_USER_ERRORS)


def leave_errors_to_command() -> None:
    """Keep rlcore's errors off the console of a command, which prints them when it ends; the API has them."""
    for handler in logging.getLogger().handlers:
        handler.addFilter(_is_unprinted)


def _is_unprinted(record: logging.LogRecord) -> bool:
    return not hasattr(record, _PRINTED)


class BudgetReachedError(RlcoreError):
    """A limit of the preset's section ``budget`` is reached; the same command with a higher one resumes."""


def is_continued(error: BaseException) -> bool:
    """Return True if an error is no failure of the run: a kill, an interruption, a reached budget."""
    return isinstance(error, BudgetReachedError) or not isinstance(error, Exception)
