"""Installed packages with versions: the environment of a model, beyond the libraries in its key."""

from __future__ import annotations

import hashlib
import platform
from functools import cache
from importlib import metadata


@cache
def pins() -> str:
    """Return a line ``name==version`` for each installed package, sorted, after one for the interpreter."""
    found = {f"{each.name.lower()}=={each.version}" for each in metadata.distributions() if each.name}
    return "\n".join([f"python=={platform.python_version()}", *sorted(found)]) + "\n"


def pins_digest() -> str:
    """Return the SHA-256 of :func:`pins`."""
    return hashlib.sha256(pins().encode()).hexdigest()
