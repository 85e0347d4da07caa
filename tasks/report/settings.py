"""Settings of a run that differ from their defaults, and from the preset that it extends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rlcore.tasks.presets.key_reference import REQUIRED, Key, describe
from rlcore.tasks.presets.run import RunConfig


@dataclass(frozen=True, kw_only=True)
class Change:
    """Setting by its dotted name, with its value, and the value that it replaces; empty if it has none.

    Values are TOML, as in :mod:`rlcore.tasks.presets.key_reference`.
    """

    name: str
    value: str
    other: str


def from_defaults(config: RunConfig) -> list[Change]:
    """Return the settings that a preset sets to other values than their defaults, or that have none."""
    return [
        Change(name=name, value=key.value, other="" if key.default == REQUIRED else key.default)
        for name, key in _keys(config)
        if key.value != key.default
    ]


def from_preset(config: RunConfig, base: RunConfig) -> list[Change]:
    """Return the settings in which two presets differ; empty values for settings that one of them lacks."""
    here, there = ({name: key.value for name, key in _keys(each)} for each in (config, base))
    return [
        Change(name=name, value=here.get(name, ""), other=there.get(name, ""))
        for name in dict.fromkeys((*here, *there))
        if name != "name" and here.get(name) != there.get(name)
    ]


def _keys(config: RunConfig) -> Iterator[tuple[str, Key]]:
    for section in describe(config):
        for key in section.keys:
            yield f"{section.path}.{key.name}".lstrip("."), key
