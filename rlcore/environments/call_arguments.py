"""Check of a call's arguments against the JSON schema of its tool, and of the schema itself.

Schemas come from type hints and MCP servers. Calls are checked against types, enumerations,
alternatives and items. The rest of a schema (``$ref``, patterns, bounds) is checked by the tool.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import gt
from typing import Any

from rlcore.environments.base import json_value, require_json
from rlcore.errors import shown

Schema = Mapping[str, Any]
_MAX_DEPTH = 32
_MAX_NAME = 128
_MAX_SCHEMAS, _MAX_VALUES = 1_000, 10_000  # of a tool: a call with a thousand values is then checked in a second
_ALTERNATIVES = ("anyOf", "oneOf")
_ELSEWHERE = ("$ref", "allOf", *_ALTERNATIVES, "patternProperties")  # keys that may declare further properties


def declaration_errors(tool: str, declared: object) -> list[str]:
    """Return the errors of a tool's declaration for a chat template; empty if its calls can be checked."""
    if not 0 < len(tool) <= _MAX_NAME or not tool.isprintable() or any(each in tool for each in " <>{}\"'"):
        return [f"'{shown(tool)}' is not a tool name"]
    function = declared.get("function") if isinstance(declared, Mapping) else None
    if not isinstance(function, Mapping) or function.get("name") != tool:
        return [f"{tool} is not declared as a function of that name"]
    errors = [] if isinstance(function.get("description"), str) else ["its description must be a text"]
    parameters = function.get("parameters")
    if not isinstance(parameters, Mapping):
        errors.append("its parameters must be the schema of a JSON object")
    else:
        kinds = parameters.get("type", "object")
        if _are_kinds(kinds) and "object" not in _listed(kinds):
            errors.append(f"parameters.type must be object, not {shown(kinds)}")
        if not _are_texts(parameters.get("required", [])):
            errors.append("parameters.required must be a list of names")
        errors += _errors(parameters, "parameters", depth=0)
        if not errors and any(map(gt, _size(parameters), (_MAX_SCHEMAS, _MAX_VALUES))):
            errors.append(f"parameters has more than {_MAX_SCHEMAS} subschemas or {_MAX_VALUES} values of enumerations")
    return [f"{tool}: {error}" for error in errors]


def arguments_of(parameters: Schema, *, text: str, named: Mapping[str, Any] | None) -> dict[str, Any] | str:
    """Return the named arguments of a call, or an error message for the policy.

    ``named`` has the arguments of formats with names. A ``text`` is the only argument of a tool, none, or a JSON
    object.
    """
    required = parameters.get("required", [])
    properties: Mapping[str, Schema | bool] = dict.fromkeys(required, True) | parameters.get("properties", {})
    others: Schema | bool = parameters.get("additionalProperties", any(key in parameters for key in _ELSEWHERE))
    found = _from_text(properties, text, others) if named is None else dict(named)
    if found is None:
        return f"the arguments are a JSON object of {', '.join(properties)}" if properties else "it takes no argument"
    try:
        require_json(found)
    except ValueError as error:
        return f"the arguments are no JSON: {error}"
    for name in found:
        if name not in properties and others is False:
            return f"there is no argument {name!r}, only {', '.join(properties) or 'none'}"
    for name in required:
        if name not in found:
            return f"the argument {name!r} is missing"
    for name, value in found.items():
        if not matches_schema(value, schema := properties.get(name, others)):
            return f"{name} must be {_kind(schema)}"
    return found


def matches_schema(value: object, schema: Schema | bool) -> bool:
    """Return True if a JSON value matches a schema. ``true`` accepts every value, ``false`` none."""
    if isinstance(schema, bool):
        return schema
    if value is None and schema.get("nullable"):
        return True
    for key in _ALTERNATIVES:
        if key in schema and not any(matches_schema(value, each) for each in schema[key]):
            return False
    if "enum" in schema and not any(value == each and _is_bool(value) == _is_bool(each) for each in schema["enum"]):
        return False
    kinds = _listed(schema.get("type", []))
    if kinds and not any(_is_a(value, kind) for kind in kinds):
        return False
    items = schema.get("items", True)
    return not isinstance(value, list) or isinstance(items, list) or all(matches_schema(each, items) for each in value)


_TYPES: Mapping[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "string": (str,),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


def _is_a(value: object, kind: str) -> bool:
    is_allowed = kind not in ("integer", "number") or not _is_bool(value)
    return is_allowed and isinstance(value, _TYPES.get(kind, (object,)))


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


def _from_text(properties: Mapping[str, Schema | bool], text: str, others: Schema | bool) -> dict[str, Any] | None:
    try:
        value = json_value(text)
    except ValueError:
        value = text
    if isinstance(value, dict) and (others is not False or set(value) <= set(properties)):
        return value
    if not properties and not text:
        return {}
    if len(properties) != 1:
        return None
    ((name, schema),) = properties.items()
    return {name: value if not matches_schema(text, schema) else text}


def _kind(schema: Schema | bool) -> str:
    if isinstance(schema, bool):
        return "left out"
    if "enum" in schema:
        return f"one of {', '.join(map(str, schema['enum']))}"
    return f"of type {' or '.join(_listed(schema.get('type', []))) or 'something else'}"


def _listed(kinds: str | list[str]) -> list[str]:
    return [kinds] if isinstance(kinds, str) else kinds


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _are_kinds(value: object) -> bool:
    return isinstance(value, str) or _are_texts(value)


def _errors(schema: object, path: str, *, depth: int) -> Iterator[str]:
    if isinstance(schema, bool):
        return
    if not isinstance(schema, Mapping):
        yield f"{path} must be a schema: an object, true or false"
        return
    if depth > _MAX_DEPTH:
        yield f"{shown(path)} is nested more than {_MAX_DEPTH} deep"
        return
    if not _are_kinds(schema.get("type", [])):
        yield f"{path}.type must be the name of a type or a list of them"
    if not isinstance(schema.get("enum", []), list):
        yield f"{path}.enum must be a list"
    if not isinstance(schema.get("properties", {}), Mapping):
        yield f"{path}.properties must be an object of schemas"
    for key in _ALTERNATIVES:
        if not isinstance(schema.get(key, []), list):
            yield f"{path}.{key} must be a list of schemas"
    for name, each in _subschemas(schema):
        yield from _errors(each, f"{path}.{name}", depth=depth + 1)


def _size(schema: Schema | bool) -> tuple[int, int]:
    if isinstance(schema, bool):
        return 1, 0
    sizes = [_size(each) for _, each in _subschemas(schema)]  # type: ignore[arg-type]  # it has no errors
    return 1 + sum(each for each, _ in sizes), len(schema.get("enum", [])) + sum(each for _, each in sizes)


def _subschemas(schema: Schema) -> Iterator[tuple[str, object]]:
    """Yield the subschemas by name. Lists of ``items``, as in older drafts, are not read."""
    if isinstance(properties := schema.get("properties"), Mapping):
        yield from ((shown(name), each) for name, each in properties.items())
    for key in _ALTERNATIVES:
        if isinstance(choices := schema.get(key), list):
            yield from ((f"{key}.{index}", each) for index, each in enumerate(choices))
    for key in ("items", "additionalProperties"):
        if key in schema and not (key == "items" and isinstance(schema[key], list)):
            yield key, schema[key]
