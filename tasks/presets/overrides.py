"""Overrides of single keys of a preset's document."""

from __future__ import annotations

import tomllib
from typing import Any

from rlcore.errors import ConfigError


def apply_override(document: dict[str, Any], override: str) -> None:
    """Set one value of a preset's document in place: ``stages.ppo.rewards.0.weight=0.5``.

    Raises:
        ConfigError: The override is not of the form ``path=value``, or its path leads through a value or beyond a list.
    """
    key, separator, text = override.partition("=")
    if not separator or not key.strip():
        raise ConfigError(f"override {override!r} is not of the form path.to.key=value")
    *parents, leaf = key.strip().split(".")
    node: Any = document
    for parent in parents:
        node = _list_item(node, parent, override) if isinstance(node, list) else node.setdefault(parent, {})
        if not isinstance(node, dict | list):
            raise ConfigError(f"override {override!r}: {parent!r} is a value, not a section")
    if isinstance(node, list):
        raise ConfigError(f"override {override!r}: name an item of the list by its number, then its key")
    node[leaf] = _override_value(text)


def _override_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):  # not TOML, or a number or nesting beyond Python's bounds
        return text.strip()  # a bare word is a string: data.prompts.path=data/my.jsonl


def _list_item(items: list[Any], index: str, override: str) -> Any:
    if not index.isdecimal() or int(index) >= len(items):
        raise ConfigError(f"override {override!r}: {index!r} is not a number below {len(items)}")
    return items[int(index)]
