"""The environments of a batch of episodes: each is made, reset, called, asked for its reward and closed.

What the policy did wrong is text for it (``CallError``, arguments that do not fit). What the
environment did wrong, its deadline included, is a ``ToolFailure``, which fails the rollout.
Methods that are ``async`` wait for each other's answers at the same time, the others run one after another in one
thread. Once more episodes have failed than a batch may lose, no other call is made: each could take its whole deadline.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import random
import threading
import traceback
from collections.abc import Awaitable, Callable, Hashable, Mapping
from functools import partial
from numbers import Real
from typing import Any, TypeVar

from rlcore.environments.base import CallError, ParsedCall, ToolFailure, ToolOutput, error_output
from rlcore.environments.call_arguments import arguments_of
from rlcore.environments.environment import EnvironmentClass, to_text
from rlcore.errors import CallTimeoutError, shown
from rlcore.seeding import derive_seed
from rlcore.timeouts import CallTimeout, WorkerThread
from rlcore.types import Prompt

MAX_FAILURES = 0.1  # share of the episodes of a batch that an environment may fail
FEW = 8  # failures that a small batch, too, is asked on after
MAX_CHARACTERS = 100_000  # of an observation; the limit in tokens is counted on what is left
_SETTING = "sampling.episodes.timeout_seconds"
_Key = TypeVar("_Key", bound=Hashable)


class EnvironmentPool:
    """One environment for each episode of a batch, by the episode's key; close it when the batch is done."""

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
        """The first observation of each episode, empty for none. ``groups``: the seeds of its group and of its own."""
        self._allowed = max(FEW, MAX_FAILURES * len(prompts))
        draws = {key: random.Random(group) for key, (group, _) in groups.items()}
        made = self._ask(dict.fromkeys(prompts, self._kind.make), "__init__")
        self._instances = {key: world for key, world in made.items() if not isinstance(world, ToolFailure)}
        starts = {
            key: partial(world.reset, prompts[key], **({"rng": draws[key]} if self._kind.takes_rng else {}))
            for key, world in self._instances.items()
        }
        found = made | self._ask(starts, "reset", shown=True)
        for key, (_, own) in groups.items():
            draws[key].seed(own)
        return found

    def answer(self, calls: Mapping[_Key, ParsedCall]) -> dict[_Key, ToolOutput | ToolFailure]:
        """What the tools say to the calls, all of which name one of them."""
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
            said = self._ask(bound, tool, shown=True)
            answers |= {key: ToolOutput(text=each) if isinstance(each, str) else each for key, each in said.items()}
        return answers

    def rewards(self, keys: list[_Key]) -> dict[_Key, float | ToolFailure | None]:
        """What each episode was worth; None for each where the class has no ``get_reward``."""
        if not self._kind.has_reward:
            return dict.fromkeys(keys)
        found = self._ask({key: self._instances[key].get_reward for key in keys}, "get_reward")
        return {key: self._reward(each) for key, each in found.items()}

    def close(self) -> None:
        """End every environment that has a ``close``, whatever it raises; its rollout is done."""
        self._failures = []
        self._ask({key: world.close for key, world in self._instances.items() if hasattr(world, "close")}, "close")
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
                reason=f"{self._kind.name}.get_reward returned {shown(repr(value))}, which is no finite number"
            )
        return float(value)

    def _ask(self, calls: Mapping[_Key, Callable[[], Any]], method: str, *, shown: bool = False) -> dict[_Key, Any]:
        """What each call gives: its value, as text where it is ``shown``; an error for the policy; or a failure."""
        found = {key: self._counted(self._guarded(method, self._deadline(method, call))) for key, call in calls.items()}
        waiting = {key: each for key, each in found.items() if inspect.isawaitable(each)}
        found |= self._finished(waiting, method) if waiting else {}
        if not shown:
            return found
        return {
            key: each if isinstance(each, ToolOutput | ToolFailure) else self._guarded(method, partial(_shown, each))
            for key, each in found.items()
        }

    def _counted(self, said: Any) -> Any:
        if isinstance(said, ToolFailure):
            self._failures.append(said)
        return said

    def _deadline(self, method: str, call: Callable[[], Any]) -> Callable[[], Any]:
        deadline = CallTimeout(seconds=self._seconds, name=self._name(method), setting=_SETTING)
        return lambda: deadline.run(call, thread=self._thread)

    def _guarded(self, method: str, call: Callable[[], Any]) -> Any:
        if len(self._failures) > self._allowed:
            return self._failures[-1]
        try:
            return call()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code: what it raises fails this rollout
            is_call = method in self._kind.schemas and isinstance(error, CallError)
            return error_output(_shown(str(error))) if is_call else self._failure(method, error)

    def _failure(self, method: str, error: BaseException) -> ToolFailure:
        if isinstance(error, CallTimeoutError):
            return ToolFailure(reason=f"{error.what}; {error.fix.partition(';')[0]}")
        frames = traceback.extract_tb(error.__traceback__)
        place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
        return ToolFailure(reason=f"{self._name(method)} raised {type(error).__name__}: {shown(error)}{place}")

    def _finished(self, waiting: Mapping[_Key, Awaitable[Any]], method: str) -> dict[_Key, Any]:
        """What the awaitables give, all awaited at once in the loop of this batch."""
        future = asyncio.run_coroutine_threadsafe(self._gather(list(waiting.values())), self._running_loop())
        late = CallTimeoutError(f"{self._name(method)} has not come back after {self._seconds:g} s", fix=_LATE)
        try:
            results = future.result(2.0 * self._seconds + 1.0)  # one that never waits keeps all the others
        except TimeoutError:
            self._loop = None  # left behind with its thread
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


_LATE = f"look for what it waits for, or raise {_SETTING}"


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()


def _given(result: Any) -> Any:
    """A result of asyncio, raised where it is an exception."""
    if isinstance(result, BaseException):
        raise result
    return result


def _shown(value: Any) -> str:
    """An observation that a tokenizer and a table can hold: half of a surrogate pair is neither's."""
    return to_text(value)[:MAX_CHARACTERS].encode("utf-8", "replace").decode()


def episode_seeds(seed: int, place: int, sample: int) -> tuple[int, int]:
    """The seeds of an episode's draws: in ``reset``, which are its group's, and from then on."""
    return derive_seed(seed, "environment", place), derive_seed(seed, "environment", place, sample)
