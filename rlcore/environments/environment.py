"""Custom environment: a stateful class whose public methods are the tools of an episode.

    class Guess:
        def reset(self, prompt: Prompt) -> str | None: ...          # the first observation
        def guess(self, number: int) -> str: ...                     # a tool: its schema from hints and docstring
        def get_reward(self) -> float: ...                           # optional: the reward of the episode

Every episode has its own instance. ``reset`` may take ``rng``, a seeded ``random.Random``: in ``reset`` its
numbers are equal for a whole group, which has one prompt; after that they differ by episode. An optional ``close`` ends
an episode. A class that finds its tools at run time has a static method ``tool_schemas``, which takes the options and
returns the schemas by name, as chat templates take them (``McpServer``).

Errors of the policy are text for it (``CallError``, arguments that do not match). Errors of the environment, including
timeouts, are a ``ToolFailure``, which fails the rollout. Methods may be ``async`` and then wait concurrently; others
run one after another in one thread. Once too many episodes have failed, no further call is made: each could take its
whole timeout.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import math
import random
import threading
import traceback
import types
from collections.abc import Awaitable, Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any, TypeVar

from transformers.utils import get_json_schema

from rlcore.environments.base import CallError, ParsedCall, ToolFailure, ToolOutput, error_output
from rlcore.environments.call_arguments import Schema, arguments_of, declaration_errors
from rlcore.errors import CallTimeoutError, ConfigError, shown
from rlcore.seeding import derive_seed
from rlcore.timeouts import CallTimeout, WorkerThread
from rlcore.types import Prompt

RESERVED = ("reset", "get_reward", "close", "tool_schemas")
MAX_FAILURES = 0.1  # maximum fraction of failed episodes in a batch
MIN_FAILURES = 8  # failures allowed in any batch
MAX_CHARACTERS = 100_000  # of an observation; the token limit applies afterwards
_MAX_DECLARED = 1_000_000  # maximum characters of all schemas
_MOST_ERRORS = 5
_SETTING = "sampling.episodes.timeout_seconds"
_LATE = f"raise {_SETTING}, or find what blocks it"
_Key = TypeVar("_Key", bound=Hashable)
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
            fix=f"its signature is {found.__name__}{inspect.signature(found)}",
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


def _declared(described: Callable[..., Any], options: Mapping[str, Any], *, name: str, where: str) -> dict[str, Schema]:
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


class EnvironmentPool:
    """One environment per episode of a batch, by the episode's key. Close it when the batch is done."""

    def __init__(self, kind: EnvironmentClass, *, timeout_seconds: float) -> None:
        self._kind, self._seconds = kind, timeout_seconds
        self._instances: dict[Any, Any] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = WorkerThread(f"calls of {kind.name}")
        self._failures: list[ToolFailure] = []
        self._allowed = math.inf

    def reset(
        self, prompts: Mapping[_Key, Prompt], groups: Mapping[_Key, tuple[int, int]]
    ) -> dict[_Key, str | ToolFailure]:
        """Return the first observation of each episode, or "". ``groups`` has the seeds of its group and its own."""
        self._allowed = max(MIN_FAILURES, MAX_FAILURES * len(prompts))
        draws = {key: random.Random(group) for key, (group, _) in groups.items()}
        made = self._ask(dict.fromkeys(prompts, self._kind.make), "__init__")
        self._instances = {
            key: environment for key, environment in made.items() if not isinstance(environment, ToolFailure)
        }
        starts = {
            key: partial(environment.reset, prompts[key], **({"rng": draws[key]} if self._kind.takes_rng else {}))
            for key, environment in self._instances.items()
        }
        found = made | self._ask(starts, "reset", shown=True)
        for key, (_, own) in groups.items():
            draws[key].seed(own)
        return found

    def answer(self, calls: Mapping[_Key, ParsedCall]) -> dict[_Key, ToolOutput | ToolFailure]:
        answers: dict[_Key, ToolOutput | ToolFailure] = {}
        for tool in self._kind.schemas:
            bound: dict[_Key, Callable[[], Any]] = {}
            for key, call in calls.items():
                if call.tool != tool:
                    continue
                given = arguments_of(self._kind.parameters_of(tool), text=call.argument, named=call.arguments)
                if isinstance(given, str):
                    answers[key] = error_output(f"{tool}: {given}")
                else:
                    bound[key] = partial(getattr(self._instances[key], tool), **given)
            result = self._ask(bound, tool, shown=True)
            answers |= {key: ToolOutput(text=each) if isinstance(each, str) else each for key, each in result.items()}
        return answers

    def rewards(self, keys: list[_Key]) -> dict[_Key, float | ToolFailure | None]:
        """Return the reward of each episode; None if the class has no ``get_reward``."""
        if not self._kind.has_reward:
            return dict.fromkeys(keys)
        found = self._ask({key: self._instances[key].get_reward for key in keys}, "get_reward")
        return {key: self._reward(each) for key, each in found.items()}

    def close(self) -> None:
        """Close every environment that has a ``close``, ignoring its errors because the rollout is done."""
        self._failures = []
        self._ask(
            {key: environment.close for key, environment in self._instances.items() if hasattr(environment, "close")},
            "close",
        )
        self._instances = {}
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None
        self._thread.end()

    def _reward(self, value: Any) -> float | ToolFailure | None:
        if value is None or isinstance(value, ToolFailure):
            return value
        if not isinstance(value, Real) or not math.isfinite(value):
            return ToolFailure(
                reason=f"{self._kind.name}.get_reward returned {shown(repr(value))}, which is not a finite number"
            )
        return float(value)

    def _ask(self, calls: Mapping[_Key, Callable[[], Any]], method: str, *, shown: bool = False) -> dict[_Key, Any]:
        found = {key: self._counted(self._guarded(method, self._deadline(method, call))) for key, call in calls.items()}
        waiting = {key: each for key, each in found.items() if inspect.isawaitable(each)}
        found |= self._finished(waiting, method) if waiting else {}
        if not shown:
            return found
        return {
            key: each if isinstance(each, ToolOutput | ToolFailure) else self._guarded(method, partial(_shown, each))
            for key, each in found.items()
        }

    def _counted(self, result: Any) -> Any:
        if isinstance(result, ToolFailure):
            self._failures.append(result)
        return result

    def _deadline(self, method: str, call: Callable[[], Any]) -> Callable[[], Any]:
        deadline = CallTimeout(seconds=self._seconds, name=self._name(method), setting=_SETTING)
        return lambda: deadline.run(call, thread=self._thread)

    def _guarded(self, method: str, call: Callable[[], Any]) -> Any:
        if len(self._failures) > self._allowed:
            return self._failures[-1]
        try:
            return call()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - an error of the user's code fails this rollout
            is_call = method in self._kind.schemas and isinstance(error, CallError)
            return error_output(_shown(str(error))) if is_call else self._failure(method, error)

    def _failure(self, method: str, error: BaseException) -> ToolFailure:
        if isinstance(error, CallTimeoutError):
            return ToolFailure(reason=f"{error.what}; {error.fix.partition(';')[0]}")
        frames = traceback.extract_tb(error.__traceback__)
        location = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
        return ToolFailure(reason=f"{self._name(method)} raised {type(error).__name__}: {shown(error)}{location}")

    def _finished(self, waiting: Mapping[_Key, Awaitable[Any]], method: str) -> dict[_Key, Any]:
        future = asyncio.run_coroutine_threadsafe(self._gather(list(waiting.values())), self._running_loop())
        late = CallTimeoutError(f"{self._name(method)} timed out after {self._seconds:g} s", fix=_LATE)
        try:
            results = future.result(2.0 * self._seconds + 1.0)  # a call that blocks the loop delays the others
        except TimeoutError:
            self._loop = None  # abandoned with its thread
            results = [late] * len(waiting)
        known = [late if isinstance(each, TimeoutError | asyncio.CancelledError) else each for each in results]
        return {key: self._guarded(method, partial(_given, each)) for key, each in zip(waiting, known, strict=True)}

    async def _gather(self, waiting: list[Awaitable[Any]]) -> list[Any]:
        limited = [asyncio.wait_for(each, self._seconds) for each in waiting]
        return list(await asyncio.gather(*limited, return_exceptions=True))

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            name = f"calls of {self._kind.name}"
            threading.Thread(target=_run_loop, args=(self._loop,), name=name, daemon=True).start()
        return self._loop

    def _name(self, method: str) -> str:
        return f"{self._kind.name}.{method}"


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()


def _given(result: Any) -> Any:
    if isinstance(result, BaseException):
        raise result
    return result


def _shown(value: Any) -> str:
    """Return an observation for tokenizer and table, which reject half of a surrogate pair."""
    return to_text(value)[:MAX_CHARACTERS].encode("utf-8", "replace").decode()


def episode_seeds(seed: int, index: int, sample: int) -> tuple[int, int]:
    """Return the seeds of an episode: its group's for ``reset``, and its own after that."""
    return derive_seed(seed, "environment", index), derive_seed(seed, "environment", index, sample)
