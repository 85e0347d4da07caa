"""Cache of results: a record for each finished stage, with everything that its key covers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rlcore.errors import StorageError
from rlcore.tasks.store.artifacts import ArtifactRef
from rlcore.tasks.store.storage import write_json

KeyInputs = Mapping[str, Any]

RECORD_FORMAT = 3
"""Format of a state directory: older records count as absent, and a directory with newer ones is refused."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """Record of a finished stage: its result, key inputs, code and environment.

    ``files``: paths of the files that the preset names, by its keys; the key inputs have only their names. ``created``:
    ISO 8601, UTC. ``environment``: digest of all installed packages. ``metrics`` summarize the stage.
    """

    key: str
    ref: ArtifactRef
    ingredients: KeyInputs
    metrics: Mapping[str, float]
    code: str
    environment: str
    created: str
    seconds: float
    files: Mapping[str, str] = field(default_factory=dict)


def describe_machine(machine: Mapping[str, object]) -> str:
    """Format the machine of a record: ``device=cpu precision=float32 instructions=AVX512 threads=1 …``.

    Empty without a model.
    """
    shown = {name: str(value) for name, value in machine.items() if value}
    return " ".join(f'{name}="{value}"' if " " in value else f"{name}={value}" for name, value in shown.items())


class StageCache:
    """Records in ``cache/<stage>/<key>.json``: the artifact of each key.

    All presets share them. If a result is computed again with other bytes, the earlier record stays as
    ``<key>.<digest>.json``. The empty file ``cache/<stage>/<preset>/<key>`` notes that a run of a preset needed a key.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find(self, stage: str, key: str) -> Record | None:
        """Return the record of a key; a damaged one, or one of another stage or key, counts as absent."""
        return _read(self.path(stage, key))

    def path(self, stage: str, key: str) -> Path:
        return self.folder / stage / f"{key}.json"

    def records(self, stage: str) -> tuple[Record, ...]:
        """Return all records of a stage, earlier ones of a key too.

        An unreadable one counts as absent.
        """
        read = (_read(path) for path in sorted((self.folder / stage).glob("*.json")))
        return tuple(record for record in read if record is not None)

    def note_use(self, stage: str, key: str, preset: str) -> None:
        """Note that a run of a preset needs a key."""
        used = self.folder / stage / preset / key
        used.parent.mkdir(parents=True, exist_ok=True)
        used.touch()

    def used_keys(self, stage: str, preset: str) -> frozenset[str]:
        """Return the keys of a stage that runs of a preset have needed."""
        return frozenset(path.name for path in (self.folder / stage).glob(f"{preset}/*"))

    def last_uses(self, stage: str, key: str = "*") -> dict[str, float]:
        """Return when a run of any preset last needed each key of a stage, or one, in seconds since 1970."""
        found: dict[str, float] = {}
        for path in (self.folder / stage).glob(f"*/{key}"):
            found[path.name] = max(found.get(path.name, 0.0), path.stat().st_mtime)
        return found

    def is_used(self, preset: str) -> bool:
        return any((folder / preset).is_dir() for folder in self.folder.glob("*"))

    def write(self, stage: str, record: Record) -> None:
        values = {field.name: getattr(record, field.name) for field in fields(record)}
        document = {"format": RECORD_FORMAT, "stage": stage, **values, "ref": record.ref.to_json()}
        as_read, path = json.loads(json.dumps(document)), self.path(stage, record.key)
        earlier = _read(path)
        if earlier is not None and earlier.ref.sha256 != record.ref.sha256:  # cleaned; the lineage of models names it
            path.rename(path.with_suffix(f".{earlier.ref.sha256[:12]}.json"))
        write_json({**document, "seal": _seal(as_read)}, path)


def now() -> str:
    """Return the current time in the format of records."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def parse_record(content: bytes, stage: str, key: str) -> Record | None:
    """Parse the record of a key; a damaged one, or one of another stage or key, counts as absent."""
    try:
        document = json.loads(content)
        seal = document.pop("seal")
        is_ours = (document["format"], document["stage"], document["key"]) == (RECORD_FORMAT, stage, key)
        if not is_ours or seal != _seal(document):
            return None
        values = {field.name: document[field.name] for field in fields(Record)}
        return Record(**{**values, "ref": ArtifactRef.from_json(values["ref"])})
    except (KeyError, TypeError, AttributeError, ValueError, StorageError):
        return None


def _read(path: Path) -> Record | None:
    try:
        return parse_record(path.read_bytes(), path.parent.name, path.name.partition(".")[0])
    except OSError:
        return None


def _seal(document: Mapping[str, Any]) -> str:
    """Return a digest of a record's other fields."""
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
