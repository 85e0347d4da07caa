"""Deny list: ``erased.jsonl`` of the state directory, by which the data gate drops rows that were erased.

The first line has a random key, each further line the keyed digest of a prompt. Who has
the file can test a guessed prompt, and read none.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rlcore.errors import StorageError
from rlcore.tasks.store.artifacts import file_sha256
from rlcore.tasks.store.locks import file_lock
from rlcore.tasks.store.settings import Home
from rlcore.tasks.store.storage import write_bytes

if TYPE_CHECKING:
    from rlcore.data_contracts.gate.denied import DeniedPrompts

_KEY_BYTES = 32


def deny_list_path(home: Home) -> Path:
    """Return the path of the list."""
    return home.root / "erased.jsonl"


def deny_list_digest(home: Home) -> Mapping[str, str]:
    """Return the digest of the list by its name, for the keys of datasets; nothing if no row was erased."""
    path = deny_list_path(home)
    return {path.name: file_sha256(path)} if path.is_file() else {}


def read_denied(home: Home) -> DeniedPrompts:
    """Return the prompts of all erased rows.

    Raises:
        StorageError: the list is damaged.
    """
    from rlcore.data_contracts.gate.denied import DeniedPrompts  # a plan needs the digest alone

    path = deny_list_path(home)
    if not path.is_file():
        return DeniedPrompts()
    try:
        first, *lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return DeniedPrompts(key=bytes.fromhex(first["key"]), digests=frozenset(line["digest"] for line in lines))
    except (ValueError, KeyError, TypeError) as error:
        fix = "restore the file from a backup, so that erased rows do not come back"
        raise StorageError(f"the list of erased rows is damaged: {error}", where=str(path), fix=fix) from error


def deny(home: Home, prompts: Iterable[str]) -> tuple[str, ...]:
    """Add prompts, by their hashes, that the list lacks; return the sorted digests of all of ``prompts``.

    Raises:
        StorageError: the list is damaged, or cannot be written.
    """
    from rlcore.data_contracts.gate.denied import DeniedPrompts

    with file_lock(home.root / "erased.lock"):
        known = read_denied(home)
        named = known if known.key else DeniedPrompts(key=secrets.token_bytes(_KEY_BYTES))
        digests = tuple(sorted({named.digest_of(prompt) for prompt in prompts}))
        if new := sorted({*digests} - known.digests):
            path = deny_list_path(home)
            before = path.read_text(encoding="utf-8") if known.key else json.dumps({"key": named.key.hex()}) + "\n"
            lines = [json.dumps({"digest": digest}) + "\n" for digest in new]
            write_bytes("".join([before, *lines]).encode(), path)
    return digests
