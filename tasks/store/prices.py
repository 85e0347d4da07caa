"""Prices of machines per hour: ``prices.toml`` in the state directory; ``infra/prices.toml`` is an example.

A machine counts as a whole: the price of a kind of GPU is that of the machine with all of its GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlcore.strict_config import NonNegativeFloat, build
from rlcore.tasks.store.settings import Home
from rlcore.tasks.store.toml_files import read_toml

FILE = "prices.toml"


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
    return home.root / FILE


def read_prices(home: Home) -> Prices:
    """Return the prices of a state directory; none if it has no such file.

    Raises:
        ConfigError: the file is not TOML, or has other keys or values.
    """
    path = prices_path(home)
    return build(Prices, read_toml(path, what="price list"), source=str(path)) if path.exists() else Prices()
