"""Every installed package with its version: what a model was made in, beyond the libraries that its key names."""

from __future__ import annotations

import hashlib
import platform
from functools import cache
from importlib import metadata


@cache
def pins() -> str:
    """One line ``name==version`` for each installed package, by name, after one for the interpreter."""
    found = {f"{each.name.lower()}=={each.version}" for each in metadata.distributions() if each.name}
    return "\n".join([f"python=={platform.python_version()}", *sorted(found)]) + "\n"


def pins_digest() -> str:
    """SHA-256 of :func:`pins`."""
    return hashlib.sha256(pins().encode()).hexdigest()
