"""Environments of a batch of episodes: construct, reset, call, get rewards, close.

Errors of the policy are text for it (``CallError``, arguments that do not match). Errors of the environment, including
timeouts, are a ``ToolFailure``, which fails the rollout.

``async`` methods wait concurrently; others run one after another in one thread. Once too many episodes of a batch have
failed, no further call is made, because each could take its whole timeout.
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

MAX_FAILURES = 0.1  # maximum fraction of failed episodes in a batch
MIN_FAILURES = 8  # failures allowed in any batch
MAX_CHARACTERS = 100_000  # of an observation; the token limit applies afterwards
_SETTING = "sampling.episodes.timeout_seconds"
_Key = TypeVar("_Key", bound=Hashable)


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
        """Return the tool outputs of the calls, all of which name a tool of the environment."""
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
        """Return the result of each call, as text if ``shown``; an error for the policy; or a failure."""
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
        """Await all results concurrently in the loop of this batch."""
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


_LATE = f"raise {_SETTING}, or find what blocks it"


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()


def _given(result: Any) -> Any:
    """Return a result of asyncio, or raise its exception."""
    if isinstance(result, BaseException):
        raise result
    return result


def _shown(value: Any) -> str:
    """Return an observation for tokenizer and table, which reject half of a surrogate pair."""
    return to_text(value)[:MAX_CHARACTERS].encode("utf-8", "replace").decode()


def episode_seeds(seed: int, index: int, sample: int) -> tuple[int, int]:
    """Return the seeds of an episode: its group's for ``reset``, and its own after that."""
    return derive_seed(seed, "environment", index), derive_seed(seed, "environment", index, sample)
