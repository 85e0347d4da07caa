"""Installed packages with versions: the environment of a model, beyond the libraries in its key."""

from __future__ import annotations

import hashlib
import platform
import sys
from functools import cache
from importlib import metadata
from pathlib import Path


@cache
def pins() -> str:
    """Return a line ``name==version`` for each installed package, sorted, after one for the interpreter."""
    found = {f"{each.name.lower()}=={each.version}" for each in metadata.distributions() if each.name}
    return "\n".join([f"python=={platform.python_version()}", *sorted(found)]) + "\n"


def installations() -> str:
    """Return the folders of installed packages with their times, which each installation or removal changes."""
    folders = [Path(each) for each in dict.fromkeys(sys.path) if Path(each).name in ("site-packages", "dist-packages")]
    return "\n".join(f"{folder} {folder.stat().st_mtime_ns}" for folder in folders if folder.is_dir())


def pins_digest() -> str:
    """Return the SHA-256 of :func:`pins`."""
    return hashlib.sha256(pins().encode()).hexdigest()
