"""An environment of the user's own: a class with a state, whose public methods are the tools of an episode.

    class Guess:
        def reset(self, prompt: Prompt) -> str | None: ...          # the first observation
        def guess(self, number: int) -> str: ...                     # a tool: its schema from hints and docstring
        def get_reward(self) -> float: ...                           # optional: what the episode was worth

A preset names it as ``module:Class``. Methods may be ``async``. Every episode has an instance of its own. ``reset`` may
take ``rng``, a seeded ``random.Random``. In ``reset`` it draws the same for a whole group, which has one prompt; from
then on each episode draws its own. ``close``, where there is one, is called at the end of an episode.

A class that learns of its tools only as it runs has a static method ``tool_schemas``, which takes the options and gives
them by name as chat templates take them (:class:`rlcore.environments.mcp_server.McpServer`).
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
_MAX_DECLARED = 1_000_000  # characters of all schemas
_MOST_ERRORS = 5
_FIX = "name a class as module:Class, of a module in the current folder or on PYTHONPATH"


@dataclass(frozen=True, kw_only=True)
class EnvironmentClass:
    """A user's class with its options. ``schemas``: of its tools, by their names, as chat templates take them."""

    make: Callable[[], Any]
    name: str
    schemas: Mapping[str, Schema]
    takes_rng: bool
    has_reward: bool

    def parameters_of(self, tool: str) -> Schema:
        """The JSON schema of a tool's arguments, an object."""
        found: Schema = self.schemas[tool]["function"]["parameters"]
        return found


def import_environment(name: str, options: Mapping[str, Any], *, where: str = "environment") -> EnvironmentClass:
    """The class that ``name`` (``module:Class``) means, with ``options`` for its constructor; ``where``: its key.

    Raises:
        ConfigError: it cannot be imported, takes other options, has no ``reset`` or no tool, or a tool without type
            hints or without a description of each argument.
    """
    module_name, _, class_name = name.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except Exception as error:  # the module is the user's: whatever its import raises
        raise ConfigError(f"cannot import the environment {name!r}: {error}", where=where, fix=_FIX) from error
    return wrap_environment(found, options, name=name, where=where)


def wrap_environment(
    found: Any, options: Mapping[str, Any], *, name: str = "", where: str = "environment"
) -> EnvironmentClass:
    """The same of a class at hand.

    Raises:
        ConfigError: as :func:`import_environment`.
    """
    name = name or getattr(found, "__name__", repr(found))
    reset = getattr(found, "reset", None)
    if not inspect.isclass(found) or not callable(reset):
        raise ConfigError(f"{name!r} is no class with a method reset", where=where, fix=_FIX)
    try:
        inspect.signature(found).bind(**options)
    except TypeError as error:
        raise ConfigError(
            f"{name!r} cannot be made with these options: {error}",
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
    """A class with the arguments of its constructor, for an error."""
    return f"{found.__name__}{inspect.signature(found)}"


def _declared(described: Callable[..., Any], options: Mapping[str, Any], *, name: str, where: str) -> dict[str, Schema]:
    """What a class, or the server behind it, says of its tools: JSON that a template and a check of calls can read."""
    try:
        said = json.dumps(dict(described(**options)), ensure_ascii=False)
        said.encode()
        schemas: dict[str, Schema] = json.loads(said)
    except ConfigError:
        raise
    except Exception as error:  # whatever a user's class does, or a server's answer does to it
        raise ConfigError(
            f"the tools of {name!r} cannot be described: {shown(error)}", where=where, fix="give their schemas as JSON"
        ) from error
    errors = [error for tool, schema in schemas.items() for error in declaration_errors(tool, schema)]
    if len(said) > _MAX_DECLARED:
        errors = [f"they take {len(said):,} characters, and no prompt has room for more than {_MAX_DECLARED:,}"]
    if errors:
        raise ConfigError(
            f"the tools of {name!r} cannot be offered: {'; '.join(errors[:_MOST_ERRORS])}",
            where=where,
            fix="correct the schemas where the tools are defined, or at their server",
        )
    return schemas


def to_text(value: object) -> str:
    """What a tool gave, as the policy reads it: a text as it is, anything else as JSON, None as nothing."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _tools_of(found: type) -> list[str]:
    names = [name for name, _ in inspect.getmembers(found, inspect.isfunction)]
    return [name for name in names if not name.startswith("_") and name not in RESERVED]


def _schema(found: type, tool: str, *, where: str) -> Schema:
    method = inspect.getattr_static(found, tool)
    # Bound, so that self is no argument; static methods have none.
    bound = method.__func__ if isinstance(method, staticmethod) else types.MethodType(getattr(found, tool), found)
    try:
        schema: dict[str, Any] = get_json_schema(bound)
    except Exception as error:  # the library has a type of its own for each error
        raise ConfigError(
            f"the method {found.__name__}.{tool} is a tool, and cannot be described: {error}",
            where=where,
            fix="give each argument a type hint and a line under Args: in the docstring; or begin its name with _",
        ) from error
    schema["function"].pop("return", None)
    return schema
