"""People who approve promotions: ``promotion.toml`` in the state directory, written by the account that owns it.

Neither a preset nor the model registry decides on this: whoever may change those could switch approvals off.

```toml
approvers = ["anna ssh-ed25519 AAAA…"]   # lines of ssh's allowed signers; an empty list: no approvals
days = 7                                 # a request ends after these
```
"""

from __future__ import annotations

import hashlib
import os
import stat
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from rlcore.config.bounds import PositiveInt
from rlcore.errors import ConfigError, PromotionError, shown
from rlcore.strict_config import build
from rlcore.tasks.store.settings import Home

FILE = "promotion.toml"
OFF = "off"  # digest in the audit log if the file asks for no approvals
_SIGNER = 3  # parts of a line: name, key type, key
_SHARED = stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True, kw_only=True)
class _File:
    approvers: tuple[str, ...]
    days: PositiveInt = 7

    def __post_init__(self) -> None:
        if wrong := [line for line in self.approvers if len(line.split()) < _SIGNER or len(line.splitlines()) > 1]:
            text = shown(wrong[0], max_chars=40)
            raise ConfigError(f"approvers: {text!r} is not name, key type and key, as in a .pub file")


@dataclass(frozen=True, kw_only=True)
class Approvers:
    """Lines of allowed signers, days of a request, and the file's SHA-256: ``off`` without signers."""

    lines: str = ""
    days: int = 0
    sha256: str = ""  # no file

    @property
    def are_needed(self) -> bool:
        """True if a promotion needs an approval."""
        return bool(self.lines)


def read_approvers(home: Home) -> Approvers:
    """Return who must approve a promotion of this state directory.

    Raises:
        PromotionError: somebody else can write the file, or it has errors.
    """
    path = home.root / FILE
    try:
        content = _read_own(path)
    except (FileNotFoundError, NotADirectoryError):
        return Approvers()
    except OSError as error:
        _refuse(path, f"cannot read it: {error.strerror}", "make it a plain file that the account of rlcore reads")
    try:
        known = build(_File, tomllib.loads(content.decode()), source=FILE)
    except (ValueError, ConfigError) as error:
        text = error.what if isinstance(error, ConfigError) else str(error)
        _refuse(path, text, 'write approvers = ["anna ssh-ed25519 AAAA…"] and days = 7')
    digest = hashlib.sha256(content).hexdigest() if known.approvers else OFF
    return Approvers(lines="\n".join(known.approvers), days=known.days, sha256=digest)


def _read_own(path: Path) -> bytes:
    """Read a file that its folder's owner alone can write or replace."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        own, folder = os.fstat(file.fileno()), path.parent.stat()
        if own.st_uid != folder.st_uid:
            _refuse(path, "it does not belong to the account that owns the state directory", "chown it")
        for each, mode in ((path, own.st_mode), (path.parent, folder.st_mode)):
            if mode & _SHARED and not mode & stat.S_ISVTX:
                _refuse(each, "others than its owner can write it", f"chmod go-w {each}")
        return file.read()


def _refuse(path: Path, what: str, fix: str) -> NoReturn:
    raise PromotionError(f"{FILE} names who approves promotions: {what}", where=str(path), fix=fix)
