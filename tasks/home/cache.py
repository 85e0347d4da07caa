"""Which key gave which result: a record for each finished stage, with everything that the result was made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rlcore.errors import StorageError
from tasks.home.artifacts import ArtifactRef
from tasks.home.storage import read_json, write_json

Ingredients = Mapping[str, Any]

_FORMAT = 2


@dataclass(frozen=True, kw_only=True)
class Record:
    """A finished stage in the cache: its result, what that was made from, by what code and in what environment.

    ``files``: where the files lay that the preset names, by its keys, since ingredients have their names alone.
    ``created``: ISO 8601, UTC. ``environment``: digest of all installed packages. ``metrics`` sum the stage up.
    """

    key: str
    ref: ArtifactRef
    ingredients: Ingredients
    metrics: Mapping[str, float]
    code: str
    environment: str
    created: str
    seconds: float
    files: Mapping[str, str] = field(default_factory=dict)


def describe_machine(machine: Mapping[str, object]) -> str:
    """A machine in a line: ``device cpu, precision float32, instructions AVX512, threads 1, …``.

    It is the ingredient of that name, as records keep it; empty for a stage that computes with no model.
    """
    return ", ".join(f"{name} {value}" for name, value in machine.items() if value)


class StageCache:
    """``cache/<stage>/<key>.json``: which key gave which artifact."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find(self, stage: str, key: str) -> Record | None:
        return _read(self.folder / stage / f"{key}.json")

    def records(self, stage: str) -> tuple[Record, ...]:
        """All records of a stage; one that cannot be read counts as absent, so its stage is computed again."""
        read = (_read(path) for path in sorted((self.folder / stage).glob("*.json")))
        return tuple(record for record in read if record is not None)

    def write(self, stage: str, record: Record) -> None:
        values = {field.name: getattr(record, field.name) for field in fields(record)}
        write_json(
            {"format": _FORMAT, **values, "ref": record.ref.to_json()}, self.folder / stage / f"{record.key}.json"
        )


def now() -> str:
    """The time, as records keep it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _read(path: Path) -> Record | None:
    try:
        document = read_json(path)
        if document["format"] != _FORMAT:
            return None
        values = {field.name: document[field.name] for field in fields(Record)}
        return Record(**{**values, "ref": ArtifactRef.from_json(values["ref"])})
    except (KeyError, TypeError, StorageError):
        return None
