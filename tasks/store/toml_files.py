"""TOML files that users write: their reader, and the prices of machines per hour.

``prices.toml`` is in the state directory; ``infra/prices.toml`` is an example. A machine counts as a whole: the price
of a kind of GPU is that of the machine with all of its GPUs.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlcore.errors import ConfigError
from rlcore.strict_config import NonNegativeFloat, build
from rlcore.tasks.store.settings import Home

MAX_BYTES, MAX_VALUES, MAX_DEPTH = 1 << 20, 2_000, 32
"""Limits of a file, its values and their nesting. The largest preset has 400 values in 7 levels."""


def read_toml(path: Path, *, what: str) -> dict[str, Any]:
    """Return the document in a file; errors call the file ``what``.

    Raises:
        ConfigError: It cannot be read, is not UTF-8 or not TOML, or is beyond a limit.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read the {what}: {error.strerror}", where=str(path)) from error
    if len(content) > MAX_BYTES:
        raise ConfigError(f"the {what} has more than {MAX_BYTES >> 20} MiB", where=str(path))
    try:
        document = tomllib.loads(content.decode("utf-8-sig"))  # editors on Windows write a byte order mark
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        what = f"the {what} is not written in UTF-8: byte 0x{content[error.start]:02x} in line {line}"
        raise ConfigError(what, where=str(path), fix="save it as UTF-8; in PowerShell with -Encoding utf8") from error
    except (ValueError, RecursionError) as error:  # not TOML, an integer of 5,000 digits, 1,000 brackets
        raise ConfigError(f"the {what} is not valid TOML: {error}", where=str(path)) from error
    if fault := _excess(document):
        raise ConfigError(f"the {what} {fault}", where=str(path), fix="remove what does not belong there")
    return document


def _excess(document: Mapping[str, Any]) -> str:
    level: list[Any] = [document]
    count = depth = 0
    while level and depth <= MAX_DEPTH and count <= MAX_VALUES:
        tables = [
            each.values() if isinstance(each, Mapping) else each for each in level if isinstance(each, dict | list)
        ]
        level = [value for table in tables for value in table]
        count, depth = count + len(level), depth + 1
    if count > MAX_VALUES:
        return f"has more than {MAX_VALUES:,} keys and values"
    return f"is nested in more than {MAX_DEPTH} levels" if level and depth > MAX_DEPTH else ""


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Prices per hour by the kind of machine: ``cpu``, or the name of its GPU."""

    currency: str = "USD"
    per_hour: Mapping[str, NonNegativeFloat] = field(default_factory=dict)

    def of(self, machine: Mapping[str, Any]) -> float | None:
        """Return the price of a machine, described as in cache keys; None if the file does not have it."""
        return self.per_hour.get(kind_of_machine(machine))


def kind_of_machine(machine: Mapping[str, Any]) -> str:
    """Return ``cpu``, or the name of the GPU without its compute capability."""
    return str(machine.get("gpu") or "").partition(" (compute capability")[0] or "cpu"


def prices_path(home: Home) -> Path:
    """Return the path of the prices of a state directory."""
    return home.root / "prices.toml"


def read_prices(home: Home) -> Prices:
    """Return the prices of a state directory; none if it has no such file.

    Raises:
        ConfigError: the file is not TOML, or has other keys or values.
    """
    path = prices_path(home)
    return build(Prices, read_toml(path, what="price list"), source=str(path)) if path.exists() else Prices()
