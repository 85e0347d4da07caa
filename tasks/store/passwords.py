"""Passwords of the servers of rlcore: generated once, in files that only their owner may read; and in addresses."""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

_BYTES = 24
_USER = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://[^/@\s]*:[^/@\s]+@")
_QUERY = re.compile(r"://\S*[?&](?:[\w-]*(?:key|token|secret|password|signature)|sig)=", re.IGNORECASE)


def has_secret(address: str) -> bool:
    """Return True if an address has a password, or a key among its parameters."""
    return bool(_USER.search(address) or _QUERY.search(address))


def draw() -> str:
    """Generate a password of letters, digits, - and _: it needs no quotes in an address, a shell or SQL."""
    return secrets.token_urlsafe(_BYTES)


def passwords(path: Path, names: Sequence[str]) -> Mapping[str, str]:
    """Return the password of each name from the file at ``path``; missing ones are generated and stored."""
    known: dict[str, str] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    missing = [name for name in names if name not in known]
    if missing:
        known |= {name: draw() for name in missing}
        write_private(path, json.dumps(known))
    return known


def private_file(path: Path) -> None:
    """Create an empty file that only its owner may read, unless it exists."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))


def write_private(path: Path, text: str, *, mode: int = 0o600) -> None:
    """Write a file atomically, with ``mode`` from its creation on."""
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
