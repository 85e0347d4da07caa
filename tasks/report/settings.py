"""Which settings of a run differ: from their defaults, and from those of the preset that it extends."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from typing import Any

from rlcore.config import to_dict
from tasks.home.nested import flatten
from tasks.preset.run import RunConfig


@dataclass(frozen=True, kw_only=True)
class Change:
    """A setting by its dotted name, with its value, and what it would be otherwise: empty where there is nothing."""

    name: str
    value: str
    other: str


def from_defaults(config: RunConfig) -> list[Change]:
    """The settings that a preset gives another value than their default, or that have none."""
    return list(_walk(config, MISSING, ""))


def from_preset(config: RunConfig, base: RunConfig) -> list[Change]:
    """The settings in which two presets differ; a setting that one of them lacks is empty there."""
    here, there = flatten(to_dict(config)), flatten(to_dict(base))
    return [
        Change(name=name, value=_text(here.get(name, MISSING)), other=_text(there.get(name, MISSING)))
        for name in dict.fromkeys((*here, *there))
        if name != "name" and here.get(name, MISSING) != there.get(name, MISSING)
    ]


def _walk(value: Any, default: Any, path: str) -> Iterator[Change]:
    if is_dataclass(value):
        for each in fields(value):
            own = getattr(default, each.name) if type(default) is type(value) else _default(each)
            inline = each.metadata.get("inline")
            yield from _walk(getattr(value, each.name), own, path if inline else f"{path}.{each.name}".lstrip("."))
    elif isinstance(value, Mapping) and any(map(is_dataclass, value.values())):
        for name, item in value.items():
            yield from _walk(item, MISSING, f"{path}.{name}")
    elif value != default:
        yield Change(name=path, value=_text(to_dict(value)), other=_text(to_dict(default)))


def _default(each: Field[Any]) -> Any:
    return each.default if each.default_factory is MISSING else each.default_factory()


def _text(value: Any) -> str:
    if value is MISSING or value is None:
        return ""
    if isinstance(value, list | dict):
        return json.dumps(value, ensure_ascii=False)
    return f"{value:g}" if isinstance(value, float) else str(value)
