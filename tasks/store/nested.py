"""Nested JSON values by dotted path, as overrides, parameters and plans name them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def flatten(value: Any, path: str = "") -> dict[str, Any]:
    """Flatten nested values: ``{"grpo": {"rewards": [{"weight": 1}]}}`` -> ``{"grpo.rewards.0.weight": 1}``."""
    flat: dict[str, Any] = {}
    if path or not isinstance(value, Mapping) or value:
        _add(flat, value, path)
    return flat


def _add(flat: dict[str, Any], value: Any, path: str) -> None:
    items: Iterable[tuple[Any, Any]] = ()
    if not isinstance(value, str | int | float):  # most are: a plan compares thousands of records
        if isinstance(value, Mapping):
            items = value.items()
        elif isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
            items = enumerate(value)
    if not items:
        flat[path] = value
    for name, item in items:
        _add(flat, item, f"{path}.{name}" if path else str(name))
