"""Nested JSON values by dotted path, as overrides, parameters and plans name them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def flatten(value: Any, path: str = "") -> dict[str, Any]:
    """Flatten nested values: ``{"grpo": {"rewards": [{"weight": 1}]}}`` -> ``{"grpo.rewards.0.weight": 1}``."""
    if isinstance(value, Mapping) and value:
        items: Iterator[tuple[Any, Any]] = iter(value.items())
    elif isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
        items = iter(enumerate(value))
    else:
        return {path: value} if path or not isinstance(value, Mapping) else {}
    flat: dict[str, Any] = {}
    for name, item in items:
        flat |= flatten(item, f"{path}.{name}" if path else str(name))
    return flat
