"""Strict construction of frozen dataclasses from nested mappings; every error names the path of its key.

A type carries its bounds (``Annotated[int, AtLeast(1)]``). ``__post_init__`` checks conditions on several fields and
raises a :class:`ConfigError` with one line per error. A table may be one of several dataclasses (:class:`OneOf`), and
a dataclass may include the keys of another (``field(metadata=INLINE)``).
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import operator
import sys
import tomllib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar

from rlcore.errors import ConfigError

T = TypeVar("T")
Hint = Callable[[str, object], str]
INLINE = MappingProxyType({"inline": True})
"""Metadata of a dataclass field whose keys are written next to those of the other fields."""
_NAMES = {int: "an integer", float: "a number", str: "a text", bool: "true or false", dict: "a table", list: "a list"}


@dataclass(frozen=True)
class AtLeast:
    """Bound: value >= ``low``."""

    low: float

    def error(self, value: float) -> str:
        return "" if value >= self.low else f"must be at least {self.low}"


@dataclass(frozen=True)
class Above:
    """Bound: value > ``low``."""

    low: float

    def error(self, value: float) -> str:
        return "" if value > self.low else f"must be greater than {self.low}"


@dataclass(frozen=True)
class Below:
    """Bound: value < ``high``."""

    high: float

    def error(self, value: float) -> str:
        return "" if value < self.high else f"must be less than {self.high}"


@dataclass(frozen=True)
class Between:
    """Bound: ``low`` <= value <= ``high``."""

    low: float
    high: float

    def error(self, value: float) -> str:
        return "" if self.low <= value <= self.high else f"must be between {self.low} and {self.high}"


@dataclass(frozen=True)
class OneOf:
    """A table built as one of the dataclasses ``kinds``, which the value of ``key`` selects."""

    key: str
    kinds: Mapping[str, type]


class _Errors(list[str]):
    """Errors found so far, and the caller's hint for a key that does not belong where it is."""

    def __init__(self, hint: Hint) -> None:
        super().__init__()
        self.hint = hint


def build(
    kind: type[T], document: Mapping[str, Any], *, source: str = "configuration", hint: Hint = lambda *_: ""
) -> T:
    """Build a frozen dataclass from nested mappings, strictly.

    ``hint`` returns what is meant by an unknown key, from its path and value, or "".

    Raises:
        ConfigError: Lists all errors, one per line, each with its path.
    """
    errors = _Errors(hint)
    value = _build(kind, document, "", errors)
    if errors:
        raise config_error(errors, source)
    return typing.cast(T, value)


def config_error(errors: Sequence[str], source: str) -> ConfigError:
    """Return one error that lists all errors of the configuration in ``source``, one per line."""
    return ConfigError(
        f"the configuration has {len(errors)} error{'s' if len(errors) > 1 else ''}:\n    " + "\n    ".join(errors),
        where=source,
        fix="correct these keys; nothing was run",
    )


def to_dict(value: Any) -> Any:
    """Return a configuration value as JSON values, with keys in field order."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        found: dict[str, Any] = {}
        for each in dataclasses.fields(value):
            plain = to_dict(getattr(value, each.name))
            found |= plain if each.metadata.get("inline") else {each.name: plain}
        return found
    if isinstance(value, Mapping):
        return {key: to_dict(value[key]) for key in sorted(value)}
    if isinstance(value, tuple | list):
        return [to_dict(item) for item in value]
    return value


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


def _build(kind: Any, value: Any, path: str, errors: _Errors) -> Any:
    origin = typing.get_origin(kind)
    if origin is Annotated:
        return _build_bounded(kind, value, path, errors)
    if dataclasses.is_dataclass(kind):
        return _build_dataclass(typing.cast(type, kind), value, path, errors)
    if origin in (typing.Union, types.UnionType) and types.NoneType in typing.get_args(kind):
        return None if value is None else _build(_without_none(kind), value, path, errors)
    if origin is Literal:
        return _build_literal(kind, value, path, errors)
    if origin is tuple:
        return _build_tuple(kind, value, path, errors)
    if origin is not None and issubclass(origin, Mapping):
        return _build_mapping(kind, value, path, errors)
    return _build_scalar(kind, value, path, errors)


def _build_bounded(kind: Any, value: Any, path: str, errors: _Errors) -> Any:
    inner, *bounds = typing.get_args(kind)
    if isinstance(bounds[0], OneOf):
        return _build_one_of(bounds[0], value, path, errors)
    before = len(errors)
    built = _build(inner, value, path, errors)
    if len(errors) == before:
        messages = (bound.error(built) for bound in bounds)
        errors += [f"{path} = {value!r}: {message}" for message in messages if message]
    return built


def _build_one_of(choice: OneOf, value: Any, path: str, errors: _Errors) -> Any:
    if not isinstance(value, Mapping):
        errors.append(f"{path} = {value!r}: must be a section")
        return None
    named = value.get(choice.key)
    if not isinstance(named, str) or named not in choice.kinds:
        known = ", ".join(map(repr, choice.kinds))
        start = (
            f"{path}.{choice.key} = {named!r}: must be" if choice.key in value else f"{path}.{choice.key}: required,"
        )
        errors.append(f"{start} one of {known}")
        return None
    return _build_dataclass(choice.kinds[named], value, path, errors)


def _build_dataclass(kind: type, value: Any, path: str, errors: _Errors) -> Any:
    if not isinstance(value, Mapping):
        meant = errors.hint(path, value)
        errors.append(f"{path or 'preset'} = {value!r}: must be a section" + (f"; {meant}" if meant else ""))
        return None
    before = len(errors)
    prefix = f"{path}." if path else ""
    known = keys_of(kind)
    unknown = {key: errors.hint(f"{prefix}{key}", value[key]) for key in value if key not in known}
    errors += [_unknown_key(key, known, prefix, meant) for key, meant in unknown.items()]
    built = _build_fields(kind, value, path, errors)
    if len(errors) > before:
        return None
    try:
        return kind(**built)
    except ConfigError as error:  # from __post_init__; errors of a whole preset have full paths already
        errors += [f"{path}: {line}" if path else line for line in error.what.splitlines()]
        return None


def keys_of(kind: type) -> list[str]:
    """Return the keys that a table of this kind may have, including those of inlined dataclasses."""
    keys: list[str] = []
    for each in dataclasses.fields(kind):
        keys += keys_of(typing.get_type_hints(kind)[each.name]) if each.metadata.get("inline") else [each.name]
    return keys


def _build_fields(kind: type, value: Mapping[str, Any], path: str, errors: _Errors) -> dict[str, Any]:
    prefix = f"{path}." if path else ""
    fields = {f.name: f for f in dataclasses.fields(kind)}
    hints = typing.get_type_hints(kind, include_extras=True)
    built = {}
    for name, described in fields.items():
        if described.metadata.get("inline"):
            own = keys_of(hints[name])
            inlined = {key: item for key, item in value.items() if key in own}
            built[name] = _build_dataclass(hints[name], inlined, path, errors)
        elif name in value:
            built[name] = _build(hints[name], value[name], f"{prefix}{name}", errors)
        elif described.default is dataclasses.MISSING and described.default_factory is dataclasses.MISSING:
            errors.append(f"{prefix}{name}: required, but missing")
    return built


def _unknown_key(key: str, fields: Sequence[str], prefix: str, meant: str) -> str:
    close = difflib.get_close_matches(key, fields, n=1)
    nearest = f"did you mean {prefix}{close[0]}?" if close else f"known: {', '.join(fields)}"
    return f"{prefix}{key}: unknown key; {meant or nearest}"


def _without_none(kind: Any) -> Any:
    first, *others = (choice for choice in typing.get_args(kind) if choice is not types.NoneType)
    return functools.reduce(operator.or_, others, first)


def _build_literal(kind: Any, value: Any, path: str, errors: _Errors) -> Any:
    choices = typing.get_args(kind)
    if value not in choices:
        errors.append(f"{path} = {value!r}: must be one of {', '.join(map(repr, choices))}")
    return value


def _build_tuple(kind: Any, value: Any, path: str, errors: _Errors) -> Any:
    if not isinstance(value, list | tuple):
        errors.append(f"{path} = {value!r}: must be a list")
        return ()
    item_kind = typing.get_args(kind)[0]
    return tuple(_build(item_kind, item, f"{path}.{i}", errors) for i, item in enumerate(value))


def _build_mapping(kind: Any, value: Any, path: str, errors: _Errors) -> Any:
    if not isinstance(value, Mapping):
        errors.append(f"{path} = {value!r}: must be a table of names and values")
        return {}
    item_kind = typing.get_args(kind)[1]
    return {key: _build(item_kind, item, f"{path}.{key}", errors) for key, item in value.items()}


def _build_scalar(kind: Any, value: Any, path: str, errors: _Errors) -> Any:
    allowed = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    if float in allowed and int not in allowed and type(value) is int:
        value = float(value) if abs(value) <= sys.float_info.max else math.inf
    if type(value) not in allowed:  # not isinstance: True is no integer
        expected = " or ".join(map(_name, allowed))
        errors.append(f"{path} = {value!r}: must be {expected}, not {_name(type(value))}")
    elif isinstance(value, float) and not math.isfinite(value):
        errors.append(f"{path} = {value!r}: must be a finite number")
    return value


def _name(kind: type) -> str:
    return _NAMES.get(kind, kind.__name__)
