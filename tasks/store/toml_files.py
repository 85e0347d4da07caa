"""Reader of TOML files that users write."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from rlcore.errors import ConfigError


def read_toml(path: Path, *, what: str) -> dict[str, Any]:
    """Return the document in a file; errors call the file ``what``.

    Raises:
        ConfigError: it cannot be read, or is not TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))  # editors on Windows write a byte order mark
    except OSError as error:
        raise ConfigError(f"cannot read the {what}: {error.strerror}", where=str(path)) from error
    except (ValueError, RecursionError) as error:  # not TOML, not UTF-8, an integer of 5,000 digits, 1,000 brackets
        raise ConfigError(f"the {what} is not valid TOML: {error}", where=str(path)) from error
