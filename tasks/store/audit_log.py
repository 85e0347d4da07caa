"""Audit log: an append-only file in which each entry holds the digest of the one before.

``audit.jsonl`` in the state directory has a line for each act that changes which model is served, or that removes or
restores state. An edited, removed or inserted line breaks the chain. A cut end does not: it shows where the registry's
aliases are not those of the last entries.
"""

from __future__ import annotations

import getpass
import hashlib
import json
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rlcore.errors import StorageError
from rlcore.tasks.store.locks import file_lock
from rlcore.tasks.store.passwords import private_file
from rlcore.tasks.store.settings import Home
from rlcore.tasks.store.storage import sync

_START = ""  # digest before the first entry


@dataclass(frozen=True, kw_only=True)
class AuditEntry:
    """One act.

    ``number``: from 1. ``time``: ISO 8601, UTC. ``action``: ``promote``, ``approve``, ``rollback``, ``gc`` or another.
    ``subject``: a registered version such as ``tiny-grpo/4``, or ``home``. ``actor``: user and host, a flow run and its
    worker, or a signing key. ``details``: whatever the action needs. ``digest``: SHA-256 over all other fields.
    """

    number: int
    time: str
    action: str
    subject: str
    actor: Mapping[str, str]
    details: Mapping[str, Any]
    previous: str
    digest: str = field(default="")

    @property
    def model(self) -> str:
        """Registered model of the subject, or empty."""
        return self.subject.rpartition("/")[0]

    def computed_digest(self) -> str:
        """Return the digest that the other fields have."""
        fields = {name: value for name, value in asdict(self).items() if name != "digest"}
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def local_actor() -> dict[str, str]:
    """Return the user and the host of this process."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        user = str(os.getuid())
    return {"user": user, "host": socket.gethostname()}


def audit_path(home: Home) -> Path:
    """Return the path of the log."""
    return home.root / "audit.jsonl"


def record_action(
    home: Home, action: str, subject: str, details: Mapping[str, Any], *, actor: Mapping[str, str] | None = None
) -> AuditEntry:
    """Append an entry and flush it to disk; return it.

    If the newest entry about the subject is the same action with the same details, that one is returned: a command that
    was killed and is repeated adds no second entry. Details of an act that may happen again need a time or a count.
    Raises:
        StorageError: the log is damaged, or cannot be written.
    """
    path = audit_path(home)
    with file_lock(home.root / "audit.lock"):
        _drop_unfinished(path)
        entries = read_entries(home)
        about = [each for each in entries if each.subject == subject]
        details = json.loads(json.dumps(details))  # as it will be read
        if about and (about[-1].action, about[-1].details) == (action, details):
            return about[-1]
        values: dict[str, Any] = {
            "number": len(entries) + 1,
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "action": action,
            "subject": subject,
            "actor": dict(actor or local_actor()),
            "details": details,
            "previous": entries[-1].digest if entries else _START,
        }
        entry = AuditEntry(**values, digest=AuditEntry(**values).computed_digest())
        private_file(path)
        with path.open("a", encoding="utf-8") as file:
            file.write(_line(entry) + "\n")
            file.flush()
            os.fsync(file.fileno())
        sync(path.parent)  # where the first entry makes the file
    return entry


def read_entries(home: Home) -> tuple[AuditEntry, ...]:
    """Return all entries, oldest first. An unfinished last line, of a process that was killed, is left out.

    Raises:
        StorageError: a line is no entry.
    """
    return tuple(_parse(audit_path(home)))


def chain_errors(home: Home) -> tuple[str, ...]:
    """Return the errors of the log; empty if every entry is as it was written."""
    path, errors, previous = audit_path(home), list[str](), _START
    try:
        entries = read_entries(home)
    except StorageError as error:
        return (error.what,)
    for place, (entry, line) in enumerate(zip(entries, _lines(path), strict=False), start=1):
        if entry.digest != entry.computed_digest() or _line(entry).encode(errors="surrogatepass") != line:
            errors.append(f"{path.name}, line {place}: the entry was changed after it was written")
        if (entry.number, entry.previous) != (place, previous):
            errors.append(f"{path.name}, line {place}: entry {entry.number} does not follow the line before it")
        previous = entry.digest
    return tuple(errors)


def _line(entry: AuditEntry) -> str:
    return json.dumps(asdict(entry), ensure_ascii=False)


def _lines(path: Path) -> list[bytes]:
    return path.read_bytes().split(b"\n")[:-1] if path.exists() else []


def _parse(path: Path) -> Iterator[AuditEntry]:
    for place, line in enumerate(_lines(path), start=1):
        try:
            entry = AuditEntry(**json.loads(line))
            if not isinstance(entry.details, dict) or not isinstance(entry.actor, dict):
                raise TypeError
            yield entry
        except (ValueError, TypeError, RecursionError) as error:
            raise StorageError(
                f"{path.name}, line {place}: not an entry of the audit log",
                where=str(path),
                fix="restore the file from a backup",
            ) from error


def _drop_unfinished(path: Path) -> None:
    """Remove a last line without its end: its act was never acknowledged."""
    if path.exists():
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if whole != content:
            os.truncate(path, len(whole))
