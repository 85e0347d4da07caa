"""Folder ``dumps`` of a state directory: a folder for each dump of its databases, named by time."""

from __future__ import annotations

from pathlib import Path

from rlcore.errors import StorageError

DUMPS = "dumps"
EMBEDDED = {"mlflow.sqlite": "mlflow.db", "prefect.sqlite": "prefect/prefect.db"}
"""Names of copies in a dump, and the databases in the state directory."""


def newest_dump(root: Path) -> Path | None:
    """Return the folder of the newest dump; None if there is none."""
    return max((root / DUMPS).glob("[0-9]*"), default=None)


def has_database(path: Path) -> bool:
    """Return True if a database is there: a file for the first one is made empty."""
    return path.is_file() and path.stat().st_size > 0


def gone_databases(root: Path) -> dict[Path, Path]:
    """Return the databases that are gone, each with its copy in the newest dump."""
    dump = newest_dump(root)
    pairs = [(root / live, dump / name) for name, live in EMBEDDED.items()] if dump else []
    return {live: copy for live, copy in pairs if copy.is_file() and not has_database(live)}


def require_databases(root: Path) -> None:
    """Refuse a state directory that has lost a database, or is restored without one: an empty one would replace it.

    Raises:
        StorageError: names the dump.
    """
    for live, copy in gone_databases(root).items():
        raise StorageError(
            f"the database is gone; the newest dump of it is {copy.relative_to(root)}",
            where=str(live),
            fix=f"take it: rlcore dump --restore; or remove the folder {DUMPS} to begin with an empty database",
        )
