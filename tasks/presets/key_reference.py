"""Reference of preset keys, from the dataclasses that read them: type, default, limits and comment.

``rlcore config`` shows them, the settings page is generated from them, and ``schema`` serves editors.
"""

from __future__ import annotations

import dataclasses
import inspect
import io
import json
import re
import tokenize
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from rlcore.config import to_dict
from rlcore.strict_config import TYPE_NAMES, Above, AtLeast, Below, Between, OneOf, one_of
from rlcore.tasks.presets.overrides import apply_override
from rlcore.tasks.presets.run import RunConfig, read_chain

NAME, NUMBER = "<name>", "<number>"  # placeholder for a name in the path of a section
UNSET = "left out"
REQUIRED = "required"
_ROLE = re.compile(r":[a-z:]+:`~?")


@dataclass(frozen=True, kw_only=True)
class Key:
    """Key: its type, its default (``required`` if it has none), and its comment in the code.

    ``value`` is the key's value in a preset, as TOML; empty if no preset is described.
    """

    name: str
    type: str
    default: str
    note: str
    value: str = ""


@dataclass(frozen=True, kw_only=True)
class Section:
    """Table: ``stages.<name>.kl``, or ``stages.grpo.kl`` of a preset. ``kind`` is the dataclass.

    ``text``: its documentation. ``nested``: names of the tables in it that a preset left out.
    """

    path: str
    kind: type
    text: str
    keys: tuple[Key, ...]
    nested: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Field:
    """Field of a table, including fields of inlined dataclasses."""

    name: str
    type: Any
    default: Any  # dataclasses.MISSING: required
    note: str


def describe(config: RunConfig | None = None) -> tuple[Section, ...]:
    """Return all sections in the order of the dataclasses: of a preset with its values, or with placeholders."""
    return tuple(_sections(RunConfig, "", config))


def fields_of(kind: type) -> Iterator[Field]:
    """Return the fields of a table in their order."""
    hints, notes = typing.get_type_hints(kind, include_extras=True), comments(kind)
    for each in dataclasses.fields(kind):
        if each.metadata.get("inline"):
            yield from fields_of(hints[each.name])
        else:
            made = each.default_factory
            default = each.default if made is dataclasses.MISSING else made()
            yield Field(name=each.name, type=hints[each.name], default=default, note=notes.get(each.name, ""))


def text_of(kind: type) -> str:
    """Return the documentation of a table, including that of inlined dataclasses."""
    hints = typing.get_type_hints(kind)
    inlined = [text_of(hints[each.name]) for each in dataclasses.fields(kind) if each.metadata.get("inline")]
    return "\n\n".join([_unmarked(inspect.cleandoc(kind.__doc__ or "")), *inlined])


def _unmarked(text: str) -> str:
    """Return a docstring for readers: names in single backticks, without roles such as ``:mod:``."""
    return _ROLE.sub("`", text.replace("``", "`"))


@cache
def comments(kind: type) -> Mapping[str, str]:
    """Return the comment of each field: ``num_threads: int = 0  # 0: torch's default``."""
    found, first = dict[str, str](), ""
    for base in filter(dataclasses.is_dataclass, kind.__bases__):
        found |= comments(base)
    for token in tokenize.generate_tokens(io.StringIO(inspect.getsource(kind)).readline):
        if token.type in (tokenize.NEWLINE, tokenize.NL, tokenize.INDENT, tokenize.DEDENT):
            first = ""
        elif token.type == tokenize.COMMENT and first:
            found[first] = _unmarked(token.string.lstrip("# "))
        first = first or (token.string if token.type == tokenize.NAME else "")
    return found


def origins(path: Path, library: Path, overrides: Iterable[str] = ()) -> dict[str, str]:
    """Return the source that set each key last: the file of the ``extends`` chain by its name, or ``--set``."""
    found: dict[str, str] = {}
    for file, document in read_chain(path, library).items():
        document.pop("extends", None)
        for gone in document.pop("without", []):
            found = {key: source for key, source in found.items() if not _is_in(key, gone)}
        found = _set(found, document, file.name)
    for override in overrides:
        one: dict[str, Any] = {}
        apply_override(one, override)
        found = _set(found, one, "--set")
    return found


def origin_of(key: str, found: Mapping[str, str]) -> str:
    """Return the source of a key, or of a key within it, as :func:`origins` found it; empty if it has its default."""
    return found.get(key) or next((file for each, file in reversed(list(found.items())) if _is_in(each, key)), "")


def _set(found: Mapping[str, str], document: Mapping[str, Any], source: str) -> dict[str, str]:
    """Add the keys of a document to those found before; a list replaces an earlier list completely."""
    changed = dict(found)
    for key in _leaves(document, ""):
        changed = {old: file for old, file in changed.items() if not _is_in(old, key)} | {key: source}
    return changed


def bounds_of(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return a type without limits and ``None``, and its limits; ``OneOf`` counts as one."""
    bounds: list[Any] = []
    while True:
        if typing.get_origin(kind) is Annotated:
            kind, *more = typing.get_args(kind)
            bounds += more
        elif types.NoneType in typing.get_args(kind):
            kind = typing.Union[tuple(each for each in typing.get_args(kind) if each is not types.NoneType)]  # noqa: UP007
        else:
            return kind, tuple(bounds)


def tables_in(kind: Any) -> tuple[str, tuple[type, ...]]:
    """Return how tables occur in a type: ``("", …)`` one, NAME or NUMBER many; no table is ``("", ())``."""
    kind, bounds = bounds_of(kind)
    if bounds and isinstance(bounds[0], OneOf):
        return "", tuple(bounds[0].kinds.values())
    if dataclasses.is_dataclass(kind):
        return "", (typing.cast(type, kind),)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple or (isinstance(origin, type) and issubclass(origin, Mapping)):
        place, inner = (NUMBER, arguments[0]) if origin is tuple else (NAME, arguments[1])
        return place, tables_in(inner)[1]
    return "", ()


def plain(value: Any) -> str:
    """Format a value as TOML on one line."""
    value = to_dict(value)
    if isinstance(value, dict):
        items = ", ".join(f"{_toml_key(key)} = {plain(item)}" for key, item in value.items())
        return f"{{ {items} }}" if items else "{}"
    if isinstance(value, list):
        return f"[{', '.join(map(plain, value))}]"
    return UNSET if value is None else json.dumps(value, ensure_ascii=False)


def _toml_key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() else json.dumps(key)


def _sections(kind: type, path: str, value: Any) -> Iterator[Section]:
    fields = list(fields_of(kind))
    tables = {each.name for each in fields if tables_in(each.type)[1]}
    keys = tuple(_key(each, value) for each in fields if each.name not in tables)
    missing = tuple(name for name in tables if value is not None and _value(value, name) is None)
    yield Section(path=path, kind=kind, text=text_of(kind), keys=keys, nested=missing)
    for each in fields:
        if each.name in tables and each.name not in missing:
            yield from _nested(each, f"{path}.{each.name}" if path else each.name, value)


def _nested(field: Field, path: str, holder: Any) -> Iterator[Section]:
    place, kinds = tables_in(field.type)
    if holder is None:
        for kind in kinds:
            yield from _sections(kind, f"{path}.{place}" if place else path, None)
        return
    value = _value(holder, field.name)
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if place else [("", value)]
    for name, item in items:
        yield from _sections(type(item), f"{path}.{name}" if place else path, item)


def _key(field: Field, value: Any) -> Key:
    is_required = field.default is dataclasses.MISSING
    return Key(
        name=field.name,
        type=type_text(field.type),
        default=REQUIRED if is_required else plain(field.default),
        note=field.note,
        value=plain(_value(value, field.name)) if value is not None else "",
    )


def type_text(kind: Any) -> str:
    """Describe a type with its limits: ``integer, at least 1``."""
    kind, bounds = bounds_of(kind)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        text = one_of(map(plain, arguments))
    elif origin is tuple:
        text = f"list of: {type_text(arguments[0])}"
    elif isinstance(origin, type) and issubclass(origin, Mapping):
        text = f"table of: {type_text(arguments[1])}"
    else:
        text = one_of(TYPE_NAMES[each] for each in (arguments or (kind,)))
    return ", ".join([text, *map(_bound_text, bounds)])


def _bound_text(bound: AtLeast | Above | Below | Between) -> str:
    match bound:
        case AtLeast(low):
            return f"at least {low:g}"
        case Above(low):
            return f"above {low:g}"
        case Below(high):
            return f"below {high:g}"
        case Between(low, high):
            return f"from {low:g} to {high:g}"


def _value(holder: Any, name: str) -> Any:
    """Return a field's value, from its inlined dataclass if it is inlined."""
    if hasattr(holder, name):
        return getattr(holder, name)
    inlined = [getattr(holder, each.name) for each in dataclasses.fields(holder) if each.metadata.get("inline")]
    return next(_value(one, name) for one in inlined if any(each.name == name for each in fields_of(type(one))))


def _leaves(value: Mapping[str, Any], path: str) -> Iterator[str]:
    """Yield the keys of a document; a list of tables is one, followed by the keys of its tables."""
    for name, item in value.items():
        key = f"{path}.{name}" if path else name
        if isinstance(item, Mapping) and item:
            yield from _leaves(item, key)
            continue
        yield key
        if isinstance(item, list):
            for place, table in enumerate(item):
                yield from _leaves(table, f"{key}.{place}") if isinstance(table, Mapping) else ()


def _is_in(key: str, table: str) -> bool:
    return key == table or key.startswith(f"{table}.")


def select_keys(sections: Sequence[Section], prefix: str) -> tuple[Section, ...]:
    """Return the sections at or below a path, or the section of a key with that key alone; all for an empty path."""
    found = []
    for section in sections:
        if not prefix or _is_in(section.path, prefix):
            found.append(section)
        elif _is_in(prefix, section.path) or not section.path:
            keys = tuple(key for key in section.keys if f"{section.path}.{key.name}".lstrip(".") == prefix)
            found += [dataclasses.replace(section, keys=keys, text="", nested=())] if keys else []
    return tuple(found)
