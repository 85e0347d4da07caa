"""JSON Schema of preset files for editors: completion, documentation, misspelt keys.

It accepts more than the reader of presets, which decides: a file that extends another may have any part of it, so only
the keys at the top of a file without ``extends`` are required.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin

from rlcore.config import to_dict
from rlcore.strict_config import Above, AtLeast, Below, Between, OneOf
from rlcore.tasks.presets.key_reference import Field, bounds_of, fields_of, text_of
from rlcore.tasks.presets.run import RunConfig

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
    found = _value(field.type, tables)
    if field.note:
        found["description"] = field.note
    default = to_dict(field.default) if field.default is not dataclasses.MISSING else None
    return found if default is None or isinstance(default, dict) else found | {"default": default}


def _value(kind: Any, tables: dict[str, Schema]) -> Schema:
    kind, bounds = bounds_of(kind)
    origin, arguments = get_origin(kind), get_args(kind)
    if bounds and isinstance(bounds[0], OneOf):
        return _one_of(bounds[0], tables)
    if dataclasses.is_dataclass(kind):
        return _reference(kind, tables)  # type: ignore[arg-type]  # a dataclass, no instance of one
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin is tuple:
        return {"type": "array", "items": _value(arguments[0], tables)}
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": _value(arguments[1], tables)}
    names = [_TYPES[each] for each in (arguments if isinstance(kind, types.UnionType) else (kind,))]
    limits = {name: value for bound in bounds for name, value in _limits(bound).items()}
    return {"type": names if len(names) > 1 else names[0], **limits}


def _one_of(choice: OneOf, tables: dict[str, Schema]) -> Schema:
    """Choose the table by ``kind``. A file that extends another may omit it; then any table is valid."""
    key, kinds = choice.key, {name: _reference(kind, tables) for name, kind in choice.kinds.items()}
    named = [
        {"if": {"properties": {key: {"const": name}}, "required": [key]}, "then": table}
        for name, table in kinds.items()
    ]
    unnamed = {"if": {"not": {"required": [key]}}, "then": {"anyOf": list(kinds.values())}}
    return {"type": "object", "properties": {key: {"enum": list(kinds)}}, "allOf": [*named, unnamed]}


def _reference(kind: type, tables: dict[str, Schema]) -> Schema:
    if kind.__name__ not in tables:
        tables[kind.__name__] = {}  # a table may contain one of its own kind
        tables[kind.__name__] = _table(kind, tables)
    return {"$ref": f"#/$defs/{kind.__name__}"}


def _limits(bound: AtLeast | Above | Below | Between) -> Schema:
    match bound:
        case AtLeast(low):
            return {"minimum": low}
        case Above(low):
            return {"exclusiveMinimum": low}
        case Below(high):
            return {"exclusiveMaximum": high}
        case Between(low, high):
            return {"minimum": low, "maximum": high}
