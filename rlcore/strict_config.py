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
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar

from rlcore.errors import ConfigError

T = TypeVar("T")
Hint = Callable[[str, object], str]
INLINE = MappingProxyType({"inline": True})
"""Metadata of a dataclass field whose keys are written next to those of the other fields."""
TYPE_NAMES: Mapping[type, str] = {str: "string", int: "integer", float: "float", bool: "boolean"}
"""Types of values in TOML's words."""


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
    """Errors found so far, the caller's hint for a key that does not belong where it is, and the keys at the top."""

    def __init__(self, hint: Hint, top: Sequence[str]) -> None:
        super().__init__()
        self._hint, self._top = hint, top

    def hint(self, path: str, value: object) -> str:
        """Return what a key means where it is none: the caller's hint, or a key of that name at the top."""
        last = path.rpartition(".")[2]
        is_section = last != path and last in self._top and isinstance(value, Mapping)
        inner = value
        while isinstance(inner, Mapping) and len(inner) == 1:
            [(name, inner)] = inner.items()
            last = f"{last}.{name}"
        return self._hint(path, value) or (f"did you mean {last}, at the top of the preset?" if is_section else "")


def build(
    kind: type[T], document: Mapping[str, Any], *, source: str = "configuration", hint: Hint = lambda *_: ""
) -> T:
    """Build a frozen dataclass from nested mappings, strictly.

    ``hint`` returns what is meant by an unknown key, from its path and value, or "".

    Raises:
        ConfigError: With all errors of :func:`build_partly`.
    """
    value, errors = build_partly(kind, document, hint=hint)
    if errors:
        raise config_error(errors, source)
    return typing.cast(T, value)


def build_partly(
    kind: type[T], document: Mapping[str, Any], *, hint: Hint = lambda *_: ""
) -> tuple[T | None, list[str]]:
    """Build as far as possible, so that the rest can be checked: return the value, and errors with their paths.

    Legal values stand in for wrong ones; a named table that cannot be built is left out. None: nothing can be built.
    """
    errors = _Errors(hint, keys_of(kind) if dataclasses.is_dataclass(kind) else ())
    return _build(kind, document, "", errors), errors


def config_error(errors: Sequence[str], source: str) -> ConfigError:
    """Return one error that lists all errors of the configuration in ``source``, one per line."""
    text = f"the configuration has {len(errors)} error{'s' if len(errors) > 1 else ''}:\n    " + "\n    ".join(errors)
    return ConfigError(text, where=source, fix="correct these keys; nothing was run")


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
    return built if len(errors) == before else _stand_in(kind)


def _stand_in(kind: Any) -> Any:
    """Return a legal value of a type, by its bounds; None for a table."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        bounds = [bound for bound in arguments[1:] if not isinstance(bound, OneOf)]
        tried = (*(getattr(bound, "low", 0) for bound in bounds), 1, 0.5, 0, -1)
        legal = (value for value in tried if not any(bound.error(value) for bound in bounds))
        return next((int(value) if arguments[0] is int else value for value in legal), None) if bounds else None
    if origin is Literal:
        return arguments[0]
    simple: Mapping[Any, Any] = {int: 1, float: 1.0, str: "", bool: False, tuple: (), Mapping: {}}
    return next((simple[each] for each in (kind, origin, *arguments) if each in simple), None)


def _build_one_of(choice: OneOf, value: Any, path: str, errors: _Errors) -> Any:
    if not isinstance(value, Mapping):
        errors.append(f"{path} = {value!r}: must be a table")
        return None
    named = value.get(choice.key)
    if not isinstance(named, str) or named not in choice.kinds:
        known = ", ".join(map(repr, choice.kinds))
        start = (
            f"{path}.{choice.key} = {named!r}: must be" if choice.key in value else f"{path}.{choice.key}: required,"
        )
        errors.append(f"{start} one of {known}{_nearest(named, choice.kinds)}")
        return None
    return _build_dataclass(choice.kinds[named], value, path, errors)


def _build_dataclass(kind: type, value: Any, path: str, errors: _Errors) -> Any:
    if not isinstance(value, Mapping):
        meant = errors.hint(path, value)
        errors.append(f"{path or 'preset'} = {value!r}: must be a table" + (f"; {meant}" if meant else ""))
        return None
    before = len(errors)
    prefix = f"{path}." if path else ""
    known = keys_of(kind)
    errors += [_unknown_key(key, value[key], known, prefix, errors) for key in value if key not in known]
    built = _build_fields(kind, value, path, errors)
    try:
        return kind(**built)
    except ConfigError as error:  # from __post_init__; errors of a whole preset have full paths already
        if len(errors) == before:  # else it may follow from the others
            errors += [f"{path}: {line}" if path else line for line in error.what.splitlines()]
        return None
    except (TypeError, AttributeError):  # of a table that could not be built
        if len(errors) == before:
            raise
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
            built[name] = _stand_in(hints[name])
        if built.get(name, name) is None and types.NoneType not in typing.get_args(hints[name]):
            del built[name]  # its default, if it has one, or a TypeError
    return built


def _unknown_key(key: str, value: object, known: Sequence[str], prefix: str, errors: _Errors) -> str:
    close = difflib.get_close_matches(key, known, n=1)
    nearest = f"did you mean {prefix}{close[0]}?" if close else ""
    is_misspelled = nearest and isinstance(value, Mapping)  # a section, whose keys mean themselves
    meant = nearest if is_misspelled else errors.hint(f"{prefix}{key}", value) or nearest
    return f"{prefix}{key}: unknown key; " + (meant or f"known: {', '.join(known)}")


def _nearest(value: object, known: Iterable[str]) -> str:
    text, names = value if isinstance(value, str) else "", [*filter(None, known)]
    close = difflib.get_close_matches(text, names, n=1) or [name for name in names if text.startswith(name)]
    return f"; did you mean {close[0]!r}?" if close else ""


def _without_none(kind: Any) -> Any:
    first, *others = (choice for choice in typing.get_args(kind) if choice is not types.NoneType)
    return functools.reduce(operator.or_, others, first)


def _build_literal(kind: Any, value: Any, path: str, errors: _Errors) -> Any:
    choices = typing.get_args(kind)
    if value in choices:
        return value
    near = _nearest(value, (each for each in choices if isinstance(each, str)))
    errors.append(f"{path} = {value!r}: must be one of {', '.join(map(repr, choices))}{near}")
    return choices[0]


def _build_tuple(kind: Any, value: Any, path: str, errors: _Errors) -> Any:
    if not isinstance(value, list | tuple):
        errors.append(f"{path} = {value!r}: must be a list")
        return ()
    item_kind = typing.get_args(kind)[0]
    built = (_build(item_kind, item, f"{path}.{i}", errors) for i, item in enumerate(value))
    return tuple(item for item in built if item is not None)


def _build_mapping(kind: Any, value: Any, path: str, errors: _Errors) -> Any:
    if not isinstance(value, Mapping):
        errors.append(f"{path} = {value!r}: must be a table")
        return {}
    item_kind = typing.get_args(kind)[1]
    built = {key: _build(item_kind, item, f"{path}.{key}", errors) for key, item in value.items()}
    return {key: item for key, item in built.items() if item is not None}


def _build_scalar(kind: Any, value: Any, path: str, errors: _Errors) -> Any:
    allowed = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    if float in allowed and int not in allowed and type(value) is int:
        value = float(value) if abs(value) <= sys.float_info.max else math.inf
    if type(value) not in allowed:  # not isinstance: True is no integer
        errors.append(f"{path} = {value!r}: must be {one_of(map(_name, allowed))}, not {_name(type(value))}")
    elif isinstance(value, float) and not math.isfinite(value):
        errors.append(f"{path} = {value!r}: must be a finite number")
    elif isinstance(value, int) and abs(value) > 2**53:  # exact as a float
        errors.append(f"{path} = {value!r}: must be at most {2**53}")
    else:
        return value
    return _stand_in(kind)


def one_of(names: Iterable[str]) -> str:
    """Return a choice in words: ``a, b or c``."""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def _name(kind: type) -> str:
    name = "table" if kind is dict else TYPE_NAMES.get(kind, kind.__name__)
    return f"an {name}" if name.startswith("i") else f"a {name}"
