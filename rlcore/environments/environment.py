"""Custom environment: a stateful class whose public methods are the tools of an episode.

    class Guess:
        def reset(self, prompt: Prompt) -> str | None: ...          # the first observation
        def guess(self, number: int) -> str: ...                     # a tool: its schema from hints and docstring
        def get_reward(self) -> float: ...                           # optional: the reward of the episode

A preset names it as ``module:Class``. Methods may be ``async``. Every episode has its own instance. ``reset`` may take
``rng``, a seeded ``random.Random``. In ``reset`` its numbers are equal for a whole group, which has one prompt; after
that they differ by episode. An optional ``close`` is called at the end of an episode.

A class that finds its tools at run time has a static method ``tool_schemas``, which takes the options and returns the
schemas by name, as chat templates take them (:class:`rlcore.environments.mcp_server.McpServer`).
"""

from __future__ import annotations

import importlib
import inspect
import json
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from transformers.utils import get_json_schema

from rlcore.environments.call_arguments import Schema, declaration_errors
from rlcore.errors import ConfigError, shown

RESERVED = ("reset", "get_reward", "close", "tool_schemas")
_MAX_DECLARED = 1_000_000  # maximum characters of all schemas
_MOST_ERRORS = 5
_FIX = "name a class as module:Class, of a module in the current folder or on PYTHONPATH"


@dataclass(frozen=True, kw_only=True)
class EnvironmentClass:
    """User's class with its options. ``schemas`` has the schema of each tool, as chat templates take it."""

    make: Callable[[], Any]
    name: str
    schemas: Mapping[str, Schema]
    takes_rng: bool
    has_reward: bool

    def parameters_of(self, tool: str) -> Schema:
        """Return the JSON schema of a tool's arguments, an object."""
        found: Schema = self.schemas[tool]["function"]["parameters"]
        return found


def import_environment(name: str, options: Mapping[str, Any], *, where: str = "environment") -> EnvironmentClass:
    """Import the class ``name`` (``module:Class``) with ``options`` for its constructor. ``where`` is its key.

    Raises:
        ConfigError: It cannot be imported, takes other options, has no ``reset`` or no tool, or a tool without type
            hints or without a description of each argument.
    """
    module_name, _, class_name = name.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (Exception, SystemExit) as error:  # a user's module may raise anything, and end its script
        raise ConfigError(f"cannot import the environment {name!r}: {error}", where=where, fix=_FIX) from error
    return wrap_environment(found, options, name=name, where=where)


def wrap_environment(
    found: Any, options: Mapping[str, Any], *, name: str = "", where: str = "environment"
) -> EnvironmentClass:
    """Wrap a class with its options.

    Raises:
        ConfigError: As for :func:`import_environment`.
    """
    name = name or getattr(found, "__name__", repr(found))
    reset = getattr(found, "reset", None)
    if not inspect.isclass(found) or not callable(reset):
        raise ConfigError(f"{name!r} is not a class with a method reset", where=where, fix=_FIX)
    try:
        inspect.signature(found).bind(**options)
    except TypeError as error:
        raise ConfigError(
            f"{name!r} cannot be constructed with these options: {error}",
            where=where,
            fix=f"its signature is {class_signature(found)}",
        ) from error
    if callable(described := getattr(found, "tool_schemas", None)):
        schemas = _declared(described, options, name=name, where=where)
    else:
        schemas = {tool: _schema(found, tool, where=where) for tool in _tools_of(found)}
    if not schemas:
        raise ConfigError(f"{name!r} has no tool", where=where, fix="write a public method: it is a tool")
    return EnvironmentClass(
        make=lambda: found(**options),
        name=name,
        schemas=schemas,
        takes_rng="rng" in inspect.signature(reset).parameters,
        has_reward=callable(getattr(found, "get_reward", None)),
    )


def class_signature(found: type) -> str:
    """Return the signature of a class's constructor, for an error message."""
    return f"{found.__name__}{inspect.signature(found)}"


def _declared(described: Callable[..., Any], options: Mapping[str, Any], *, name: str, where: str) -> dict[str, Schema]:
    """Return the tool schemas that a class, or its server, declares, checked for templates and calls."""
    try:
        declared = json.dumps(dict(described(**options)), ensure_ascii=False)
        declared.encode()
        schemas: dict[str, Schema] = json.loads(declared)
    except ConfigError:
        raise
    except Exception as error:  # a user's class or a server may raise anything
        raise ConfigError(
            f"the tools of {name!r} cannot be described: {shown(error)}", where=where, fix="give their schemas as JSON"
        ) from error
    errors = [error for tool, schema in schemas.items() for error in declaration_errors(tool, schema)]
    if len(declared) > _MAX_DECLARED:
        errors = [f"they take {len(declared):,} characters, and no prompt has room for more than {_MAX_DECLARED:,}"]
    if errors:
        raise ConfigError(
            f"the tools of {name!r} cannot be offered: {'; '.join(errors[:_MOST_ERRORS])}",
            where=where,
            fix="correct the schemas where the tools are defined, or at their server",
        )
    return schemas


def to_text(value: object) -> str:
    """Return a tool's result for the policy: text unchanged, None as nothing, anything else as JSON."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _tools_of(found: type) -> list[str]:
    names = [name for name, _ in inspect.getmembers(found, inspect.isfunction)]
    return [name for name in names if not name.startswith("_") and name not in RESERVED]


def _schema(found: type, tool: str, *, where: str) -> Schema:
    method = inspect.getattr_static(found, tool)
    # Bound, so that self is not an argument; static methods have none.
    bound = method.__func__ if isinstance(method, staticmethod) else types.MethodType(getattr(found, tool), found)
    try:
        schema: dict[str, Any] = get_json_schema(bound)
    except Exception as error:  # the library has a type for each error
        raise ConfigError(
            f"the method {found.__name__}.{tool} is a tool that cannot be described: {error}",
            where=where,
            fix="give each argument a type hint and a line under Args: in the docstring; or begin its name with _",
        ) from error
    schema["function"].pop("return", None)
    return schema
