"""Strict construction of frozen dataclasses from nested mappings; every error names the path of its key.

Types carry bounds (``Annotated[int, at_least(1)]``). ``__post_init__`` raises a :class:`ConfigError` with one line per
error on several fields. A table may be one of several dataclasses (:class:`OneOf`), or include the keys of another
(``field(metadata=INLINE)``).
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
class Bound:
    """Limit of a number, in words and by its name in JSON Schema."""

    text: str
    limits: tuple[tuple[str, float], ...]

    def holds(self, value: float) -> bool:
        return all(_TESTS[name](value, limit) for name, limit in self.limits)


_TESTS: Mapping[str, Callable[[float, float], bool]] = {
    "minimum": operator.ge,
    "exclusiveMinimum": operator.gt,
    "exclusiveMaximum": operator.lt,
    "maximum": operator.le,
}


def at_least(low: float) -> Bound:
    """Return the bound value >= ``low``."""
    return Bound(f"at least {low}", (("minimum", low),))


def above(low: float) -> Bound:
    """Return the bound value > ``low``."""
    return Bound(f"greater than {low}", (("exclusiveMinimum", low),))


def below(high: float) -> Bound:
    """Return the bound value < ``high``."""
    return Bound(f"less than {high}", (("exclusiveMaximum", high),))


def between(low: float, high: float) -> Bound:
    """Return the bound ``low`` <= value <= ``high``."""
    return Bound(f"between {low} and {high}", (("minimum", low), ("maximum", high)))


Scalar = str | int | float | bool

PositiveInt = Annotated[int, at_least(1)]
NonNegativeInt = Annotated[int, at_least(0)]
PositiveFloat = Annotated[float, above(0.0)]
NonNegativeFloat = Annotated[float, at_least(0.0)]
Duration = Annotated[float, above(0.0), below(1e6)]  # in seconds or minutes; clocks and locks have a largest wait
Fraction = Annotated[float, between(0.0, 1.0)]
Decay = Annotated[float, at_least(0.0), below(1.0)]  # of a running average


@dataclass(frozen=True, eq=False)
class OneOf:
    """A table built as one of the dataclasses ``kinds``, which the value of ``key`` selects."""

    key: str
    kinds: Mapping[str, type]


@dataclass(frozen=True)
class Shape:
    """Parts of a type of settings.

    ``of``: values of a ``choice``, type of the items of a ``list`` or ``mapping``, dataclass of a ``table``,
    a :class:`OneOf`, or types of a ``scalar``. Only scalars have bounds.
    """

    form: Literal["choice", "list", "mapping", "table", "one of", "scalar"]
    of: tuple[Any, ...]
    bounds: tuple[Bound, ...] = ()
    is_optional: bool = False


@functools.cache
def shape_of(kind: Any) -> Shape:
    """Return the parts of a type of settings."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        if isinstance(arguments[1], OneOf):
            return Shape("one of", arguments[1:])
        return dataclasses.replace(shape_of(arguments[0]), bounds=arguments[1:])
    if types.NoneType in arguments:
        inner = functools.reduce(operator.or_, (each for each in arguments if each is not types.NoneType))
        return dataclasses.replace(shape_of(inner), is_optional=True)
    if dataclasses.is_dataclass(kind):
        return Shape("table", (kind,))
    if origin is Literal:
        return Shape("choice", arguments)
    if origin is tuple:
        return Shape("list", arguments[:1])
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return Shape("mapping", arguments[1:])
    return Shape("scalar", arguments or (kind,))


class _Errors(list[str]):
    """Errors so far, the caller's hint for unknown keys, and the top-level keys."""

    def __init__(self, hint: Hint, top: Sequence[str]) -> None:
        super().__init__()
        self._hint, self._top = hint, top

    def wrong(self, kind: Any, path: str, value: object, text: str) -> Any:
        """Add an error, and return a value that stands in."""
        self.append(f"{path} = {value!r}: {text}")
        return _stand_in(kind)

    def hint(self, path: str, value: object) -> str:
        """Return what an unknown key means: the caller's hint, or a top-level key of that name."""
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

    ``hint`` explains an unknown key, from its path and value, or returns "".

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
    """Build as far as possible: return the value, and errors with their paths.

    Legal values stand in for wrong ones; tables that cannot be built are left out. None: nothing can be built.
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
    shape = shape_of(kind)
    if value is None and shape.is_optional:
        return None
    if shape.form in ("one of", "table", "mapping") and not isinstance(value, Mapping):
        meant = errors.hint(path, value) if shape.form == "table" else ""
        return errors.wrong(kind, path or "preset", value, "must be a table" + (f"; {meant}" if meant else ""))
    match shape.form:
        case "scalar":
            return _build_scalar(shape, kind, value, path, errors)
        case "one of":
            return _build_one_of(shape.of[0], value, path, errors)
        case "table":
            return _build_table(shape.of[0], value, path, errors)
        case "mapping":
            built = {key: _build(shape.of[0], item, f"{path}.{key}", errors) for key, item in value.items()}
            return {key: item for key, item in built.items() if item is not None}
        case "list" if isinstance(value, list | tuple):
            items = [_build(shape.of[0], item, f"{path}.{place}", errors) for place, item in enumerate(value)]
            return tuple(item for item in items if item is not None)
        case "list":
            return errors.wrong(kind, path, value, "must be a list")
        case "choice" if value not in shape.of:
            near = _nearest(value, (each for each in shape.of if isinstance(each, str)))
            return errors.wrong(kind, path, value, f"must be one of {', '.join(map(repr, shape.of))}{near}")
    return value


def _build_scalar(shape: Shape, kind: Any, value: Any, path: str, errors: _Errors) -> Any:
    is_whole = float in shape.of and int not in shape.of and type(value) is int
    if is_whole and abs(value) > sys.float_info.max:
        value = math.inf
    number = float(value) if is_whole else value
    text = _scalar_error(shape, number)
    return errors.wrong(kind, path, value, text) if text else number


def _scalar_error(shape: Shape, value: Any) -> str:
    if type(value) not in shape.of:  # not isinstance: True is no integer
        return f"must be {one_of(map(_name, shape.of))}, not {_name(type(value))}"
    if isinstance(value, float) and not math.isfinite(value):
        return "must be a finite number"
    if isinstance(value, int) and abs(value) > 2**53:  # exact as a float
        return f"must be at most {2**53}"
    return next((f"must be {bound.text}" for bound in shape.bounds if not bound.holds(value)), "")


def _stand_in(kind: Any) -> Any:
    """Return a legal value of a type; None for a table."""
    shape = shape_of(kind)
    if shape.form in ("table", "one of"):
        return None
    if shape.form != "scalar":
        return {"choice": shape.of[0], "list": (), "mapping": {}}[shape.form]
    limits = (limit for bound in shape.bounds for _, limit in bound.limits)
    tried: tuple[Any, ...] = (*limits, {int: 1, float: 1.0, str: "", bool: False}[shape.of[0]], 0.5, 0, -1)
    return next((value for value in tried if all(bound.holds(value) for bound in shape.bounds)), None)


def _build_one_of(choice: OneOf, value: Mapping[str, Any], path: str, errors: _Errors) -> Any:
    named = value.get(choice.key)
    try:
        table = choice.kinds[named] if isinstance(named, str) else None
    except KeyError:
        table = None
    except ConfigError as error:  # of a kind that the mapping imports
        errors.append(f"{path}.{choice.key}: {error.what}; {error.fix}")
        return None
    if table is not None:
        return _build_table(table, value, path, errors)
    start = f"{choice.key} = {named!r}: must be" if choice.key in value else f"{choice.key}: required,"
    known = ", ".join(map(repr, choice.kinds))
    errors.append(f"{path}.{start} one of {known}{_nearest(named, choice.kinds)}")
    return None


def _build_table(kind: type, value: Mapping[str, Any], path: str, errors: _Errors) -> Any:
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
            built[name] = _build_table(hints[name], inlined, path, errors)
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


def one_of(names: Iterable[str]) -> str:
    """Return a choice in words: ``a, b or c``."""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def _name(kind: type) -> str:
    name = "table" if kind is dict else TYPE_NAMES.get(kind, kind.__name__)
    return f"an {name}" if name.startswith("i") else f"a {name}"
