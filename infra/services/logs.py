"""Rotation of the services' logs while the services write them."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

MAX_BYTES = 20 * 2**20
KEPT = 4  # rotated files of each log
_ROTATED_DAYS, _REMOVED_DAYS = 7.0, 30.0
_DAY = 86_400.0


def rotate(log: Path, *, began: float) -> None:
    """Copy a log that is too long, or has lines of more than a week, to ``.1`` and empty it; ``.1`` becomes ``.2`` …

    A service holds its file open and appends, so the file itself stays. Lines that are written between the copy and the
    emptying are lost. ``began``: the time since which there may be lines, if the log was never rotated.
    """
    if not log.exists():
        return
    old = [log.with_name(f"{log.name}.{number}") for number in range(1, KEPT + 1)]
    for each in old:
        if each.exists() and time.time() - each.stat().st_mtime > _REMOVED_DAYS * _DAY:
            each.unlink()
    emptied = old[0].stat().st_mtime if old[0].exists() else began
    size = log.stat().st_size
    if size > MAX_BYTES or (size and time.time() - emptied > _ROTATED_DAYS * _DAY):
        for newer, older in zip(old[-2::-1], old[:0:-1], strict=True):
            if newer.exists():
                newer.replace(older)
        shutil.copyfile(log, old[0])
        os.truncate(log, 0)
