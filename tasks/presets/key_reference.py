"""Reference of preset keys, from the dataclasses that read them: type, default, limits and comment.

As TOML for ``rlcore config``, as the settings page, and as a JSON Schema for editors.
"""

from __future__ import annotations

import dataclasses
import inspect
import io
import json
import re
import tokenize
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rlcore.config import to_dict
from rlcore.strict_config import TYPE_NAMES, OneOf, one_of, shape_of
from rlcore.tasks.presets.run import RunConfig, apply_override, read_chain

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
    return "\n\n".join([unmarked(inspect.cleandoc(kind.__doc__ or "")), *inlined])


def unmarked(text: str) -> str:
    """Return a docstring for readers: names in single backticks, without roles such as ``:mod:``."""
    return _ROLE.sub("`", text.replace("``", "`"))


@cache
def comments(kind: type) -> Mapping[str, str]:
    """Return the comment of each field: on its line, or on the lines above it."""
    found, first, above = dict[str, str](), "", list[str]()
    for base in filter(dataclasses.is_dataclass, kind.__bases__):
        found |= comments(base)
    for token in tokenize.generate_tokens(io.StringIO(inspect.getsource(kind)).readline):
        if token.type in (tokenize.NEWLINE, tokenize.NL, tokenize.INDENT, tokenize.DEDENT):
            first = ""
        elif token.type == tokenize.COMMENT:
            above.append(token.string.lstrip("# "))
        elif token.type == tokenize.NAME and not first:
            first = token.string
        if first and above:
            found[first], above = unmarked(" ".join(above)), []
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


def tables_in(kind: Any) -> tuple[str, tuple[type, ...]]:
    """Return how tables occur in a type: ``("", …)`` one, NAME or NUMBER many; no table is ``("", ())``."""
    shape = shape_of(kind)
    match shape.form:
        case "one of":
            return "", tuple(shape.of[0].kinds.values())
        case "table":
            return "", shape.of
        case "list" | "mapping":
            return (NUMBER if shape.form == "list" else NAME), tables_in(shape.of[0])[1]
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
    shape = shape_of(kind)
    match shape.form:
        case "choice":
            return one_of(map(plain, shape.of))
        case "list" | "mapping":
            return f"{'list' if shape.form == 'list' else 'table'} of: {type_text(shape.of[0])}"
    return ", ".join([one_of(TYPE_NAMES[each] for each in shape.of), *(bound.text for bound in shape.bounds)])


def _value(holder: Any, name: str) -> Any:
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


_WIDTH = 48  # width of key and value, before the comment
_HEAD = """# Settings

Every key of a preset.

- `rlcore config mine.toml` prints a complete preset with the source of each key.
- `rlcore config --schema > preset.schema.json` writes a JSON Schema for editors. The first line of a preset names it:
  `#:schema ./preset.schema.json`.
- A file with `extends = "tiny"` holds only what differs from that preset. Tables are merged key by key, lists are
  replaced. `without = ["stages.ppo", "promotion"]` leaves out what that one has.
- Any key can be set for one run: `rlcore run mine.toml --set stages.grpo.learning_rate=2e-6`.

What a graph of datasets and stages can say: [Recipes](recipes.md).
"""


def as_toml(sections: Sequence[Section], found: Mapping[str, str]) -> str:
    """Format sections of a preset as TOML that reads back equal; comments describe each key and name its source.

    ``found`` comes from :func:`origins`.
    """
    return "\n".join(line for section in sections for line in _section_lines(section, found))


def as_markdown() -> str:
    """Return the page of all keys that a preset may have."""
    sections = describe()
    homes: dict[type, Section] = {}
    for section in sorted(sections, key=lambda each: each.path.count(".")):
        homes.setdefault(section.kind, section)
    return _HEAD + "".join(_markdown(section, homes[section.kind]) for section in sections)


def _section_lines(section: Section, found: Mapping[str, str]) -> Iterator[str]:
    table, _, last = section.path.rpartition(".")
    if section.path:
        yield f"[[{table}]]" if last.isdecimal() else f"[{section.path}]"
    yield from (f"# {line}".rstrip() for line in section.text.splitlines())
    for key in section.keys:
        file = origin_of(f"{section.path}.{key.name}".lstrip("."), found)
        comment = "; ".join(
            part for part in (key.type, _default(key), key.note, f"set in {file}" if file else "") if part
        )
        # TOML has no null: an absent value is a comment.
        line = f"# {key.name}: {UNSET}" if key.value == UNSET else f"{key.name} = {key.value}"
        yield f"{line:<{_WIDTH}}  # {comment}"
    yield from (f"# [{f'{section.path}.{name}'.lstrip('.')}]: {UNSET}" for name in section.nested)
    yield ""


def _default(key: Key) -> str:
    return REQUIRED if key.default == REQUIRED else f"default {key.default}"


def _markdown(section: Section, home: Section) -> str:
    heading = f"`[{section.path}]`{_kind_of(section)}" if section.path else "The top of the file"
    if section is not home:
        return (
            f"\n#### {heading}\nThe keys of `[{home.path}]` {'above' if home.path == section.path else ''}".rstrip()
            + ".\n"
        )
    level = "###" if "." in section.path.removesuffix(f".{NAME}") else "##"
    rows = "".join(map(_row, section.keys))
    table = f"\n| key | type | default | |\n|---|---|---|---|\n{rows}" if rows else ""
    return f"\n{level} {heading}\n{section.text}\n{table}"


def _row(key: Key) -> str:
    cells = (f"`{key.name}`", key.type, key.default, key.note)
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |\n"


def _kind_of(section: Section) -> str:
    is_stage = section.path == f"stages.{NAME}"
    return "".join(f" of kind = {key.type}" for key in section.keys if is_stage and key.name == "kind")


_TYPES = {int: "integer", float: "number", str: "string", bool: "boolean"}
_OF_FILES = {
    "extends": {"type": "string", "description": "The preset that this one differs from, by its name."},
    "without": {
        "type": "array",
        "items": {"type": "string"},
        "description": "What that one has and this one does not: stages.ppo, promotion.",
    },
}
Schema = dict[str, Any]


def preset_schema() -> Schema:
    """Return the schema of a preset file, JSON Schema draft 2020-12."""
    tables: dict[str, Schema] = {}
    preset = _table(RunConfig, tables)
    required = [each.name for each in fields_of(RunConfig) if each.default is dataclasses.MISSING]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A preset of rlcore",
        **preset,
        "properties": _OF_FILES | preset["properties"],
        "if": {"not": {"required": ["extends"]}},
        "then": {"required": required},
        "$defs": tables,
    }


def _table(kind: type, tables: dict[str, Schema]) -> Schema:
    return {
        "type": "object",
        "description": text_of(kind),
        "properties": {each.name: _property(each, tables) for each in fields_of(kind)},
        "additionalProperties": False,
    }


def _property(field: Field, tables: dict[str, Schema]) -> Schema:
    found = _schema_of(field.type, tables)
    if field.note:
        found["description"] = field.note
    default = to_dict(field.default) if field.default is not dataclasses.MISSING else None
    return found if default is None or isinstance(default, dict) else found | {"default": default}


def _schema_of(kind: Any, tables: dict[str, Schema]) -> Schema:
    shape = shape_of(kind)
    match shape.form:
        case "one of":
            return _one_of(shape.of[0], tables)
        case "table":
            return _reference(shape.of[0], tables)
        case "choice":
            return {"enum": list(shape.of)}
        case "list":
            return {"type": "array", "items": _schema_of(shape.of[0], tables)}
        case "mapping":
            return {"type": "object", "additionalProperties": _schema_of(shape.of[0], tables)}
    names = [_TYPES[each] for each in shape.of]
    limits = {name: limit for bound in shape.bounds for name, limit in bound.limits}
    return {"type": names if len(names) > 1 else names[0], **limits}


def _one_of(choice: OneOf, tables: dict[str, Schema]) -> Schema:
    """Choose the table by ``kind``. A file that extends another may omit it; then any table is valid."""
    key, kinds = choice.key, {name: _reference(kind, tables) for name, kind in choice.kinds.items()}
    named = [
        {"if": {"properties": {key: {"const": name}}, "required": [key]}, "then": table}
        for name, table in kinds.items()
    ]
    unnamed = {"if": {"not": {"required": [key]}}, "then": {"anyOf": list(kinds.values())}}
    imported = {"properties": {key: {"type": "string", "pattern": ":"}}, "required": [key]}  # module:NAME
    known = {"if": {"not": imported}, "then": {"properties": {key: {"enum": list(kinds)}}}}
    return {"type": "object", "allOf": [known, *named, unnamed]}


def _reference(kind: type, tables: dict[str, Schema]) -> Schema:
    if kind.__name__ not in tables:
        tables[kind.__name__] = {}  # a table may contain one of its own kind
        tables[kind.__name__] = _table(kind, tables)
    return {"$ref": f"#/$defs/{kind.__name__}"}
