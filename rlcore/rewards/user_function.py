"""User's function as a reward: ``kind = "module:function"``, plain or ``async``, with options from the preset.

    def brief(rollouts: Sequence[Rollout], *, limit: int = 200) -> list[float | None]: ...

It returns one value per rollout of the batch, None if it cannot grade. A list of rewards, one for each of
``rollout.turns``, counts by its sum. Numbers may be Python's, numpy's or torch's. An exception stops the run, because a
reward that fails only for some completions would reward failure. Functions with TRL's parameters are called as TRL
calls them, and only these can run in another interpreter (``other_interpreter.py``):

    def accuracy(completions, solution, **columns) -> list[float | None]: ...

``prompts`` and ``completions`` are texts if the source has its questions as texts, else lists of messages. Each column
of the rows is a list with one value per completion. None means that the reward does not apply to a completion.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rlcore.config import RewardTerm
from rlcore.config.rl import DEFAULT_TIMEOUT_MINUTES
from rlcore.errors import ConfigError, RewardError, RlcoreError
from rlcore.rewards.base import failed_score, scored
from rlcore.rewards.mix import WeightedReward, WeightedTerm
from rlcore.rewards.other_interpreter import FunctionError, OtherFunction
from rlcore.timeouts import CallTimeout
from rlcore.types import Prompt, Rollout, Score

Value = float | Sequence[float] | None
Values = list[Value]
UserFunction = Callable[..., Values | Awaitable[Values]]
"""Maps rollouts (and options, by name) to one value each, None if it cannot grade."""

_MAX_TRIALS = 64


class FunctionReward:
    """User's function as a reward. Its term has the function's name.

    ``none_is_skipped``: None means that the reward does not apply to a rollout, as in TRL, and not that it failed.
    ``other``: the function in another interpreter that ``function`` calls, whose process ends with this reward.
    """

    def __init__(
        self,
        function: UserFunction,
        name: str,
        *,
        timeout_minutes: float = DEFAULT_TIMEOUT_MINUTES,
        none_is_skipped: bool = False,
        other: OtherFunction | None = None,
    ) -> None:
        self._function, self.name, self._other = function, name, other
        self._file = "" if other else _file_of(function)
        self._seconds, self._none_is_skipped = 60.0 * timeout_minutes, none_is_skipped

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """Score a batch.

        Raises:
            RewardError: The function raised, returned a wrong number of values, or a value that is neither a number nor
                None; names the function and the rollout.
            CallTimeoutError: It timed out.
        """
        if not rollouts:
            return []
        try:
            values = self._call(rollouts)
        except RlcoreError:
            self.close()  # a call that timed out is still running
            raise
        except Exception as error:
            raise self._failure(error, rollouts) from error
        values = plain_numbers(values)
        if not isinstance(values, list | tuple):
            what = f"{self.name} returned {type(values).__name__}, not a list"
            raise RewardError(what, where=self._file, fix=_ONE_EACH)
        if len(values) != len(rollouts):
            what = f"{self.name} returned {len(values)} values for {len(rollouts)} rollouts"
            raise RewardError(what, where=self._file, fix=_ONE_EACH)
        return [self._score(plain_numbers(value), rollout) for value, rollout in zip(values, rollouts, strict=True)]

    def close(self) -> None:
        """End the process in another interpreter, if there is one."""
        if self._other is not None:
            self._other.close()

    def _call(self, rollouts: Sequence[Rollout]) -> Values:
        first = rollouts[0]
        deadline = CallTimeout(
            seconds=self._seconds,
            name=f"the reward function {self.name}",
            where=f"{len(rollouts)} rollouts; the first is of prompt {first.prompt.prompt_id!r}: {first.text[:120]!r}",
            setting="timeout_minutes of the reward",
        )
        values: Values = call_within(deadline, self._function, rollouts)
        return values

    def _failure(self, error: Exception, rollouts: Sequence[Rollout]) -> RewardError:
        raised, line = (error.text, error.where) if isinstance(error, FunctionError) else self._described(error)
        return RewardError(
            f"the reward function {self.name} raised {raised}",
            where=f"{line}, {self._failing_rollout(rollouts)}",
            fix="correct the function; it returns None for a completion that it cannot grade",
        )

    def _described(self, error: Exception) -> tuple[str, str]:
        """Return an exception as text, and the last line of the function's file that it passed."""
        frames = traceback.extract_tb(error.__traceback__)
        last = frames[-1]
        own = next((frame for frame in reversed(frames) if frame.filename == self._file), last)
        inside = "" if own is last else f" (in {last.name}, {last.filename}:{last.lineno})"
        return f"{type(error).__name__}: {error}{inside}", f"{own.filename}:{own.lineno}"

    def _failing_rollout(self, rollouts: Sequence[Rollout]) -> str:
        """Return the first rollout on which the function fails alone, because the batch does not identify it."""
        for rollout in rollouts[:_MAX_TRIALS]:
            try:
                self._call([rollout])
            except Exception:  # noqa: BLE001 - any failure names the rollout
                return f"rollout of prompt {rollout.prompt.prompt_id!r}: {rollout.text[:200]!r}"
        return f"a batch of {len(rollouts)} rollouts, none of which fails alone"

    def _score(self, value: Value, rollout: Rollout) -> Score:
        if value is None:
            skipped = Score(value=0.0, terms={}, skipped=(self.name,))
            return skipped if self._none_is_skipped else failed_score("the function returned None")
        rewards = tuple(map(plain_numbers, value)) if isinstance(value, list | tuple) else (value,)
        where = ", ".join(filter(None, (self._file, f"rollout of prompt {rollout.prompt.prompt_id!r}")))
        if not all(isinstance(reward, int | float) for reward in rewards):
            raise RewardError(f"{self.name} returned {value!r}", where=where, fix=_ONE_EACH)
        if not isinstance(value, list | tuple):
            return scored(self.name, float(rewards[0]))
        if len(rewards) != len(rollout.turns):
            what = f"{self.name} returned {len(rewards)} rewards for a rollout of {len(rollout.turns)} turns"
            raise RewardError(what, where=where, fix="return one for each of rollout.turns, or one float for all")
        return replace(scored(self.name, float(sum(rewards))), turn_rewards=tuple(map(float, rewards)))


def call_within(deadline: CallTimeout, function: Callable[..., Any], batch: Sequence[Any]) -> Any:
    """Return the result of a function, plain or ``async``, for a batch.

    Raises:
        CallTimeoutError: It timed out.
    """
    outcome = deadline.run(partial(function, batch))
    if not inspect.isawaitable(outcome):
        return outcome
    # In a new thread, because the caller's thread may run an event loop.
    return deadline.run_in_thread(partial(asyncio.run, _finished(outcome)))


def plain_numbers(value: Any) -> Any:
    """Convert numbers and arrays of numpy or torch to Python's; return other values unchanged."""
    return value.tolist() if hasattr(value, "tolist") else value


def _file_of(function: Callable[..., Any]) -> str:
    inner = inspect.unwrap(function.func if isinstance(function, partial) else function)
    code = getattr(inner, "__code__", None) or getattr(type(inner).__call__, "__code__", None)
    return code.co_filename if code else ""


_ONE_EACH = "return a list with one float per rollout, or None if the function cannot grade it"


def import_function(term: RewardTerm, path: str) -> FunctionReward:
    """Import the reward that ``term.kind`` names.

    Raises:
        ConfigError: As for :func:`load_function`.
    """
    function = load_function(term, path, given="rollouts")
    is_of_trl = is_trl_function(function)
    served = trl_function(function, name=_name_of(term), path=path) if is_of_trl else function
    return FunctionReward(
        served,
        _name_of(term),
        timeout_minutes=term.timeout_minutes,
        none_is_skipped=is_of_trl,
        other=function.func if isinstance(function.func, OtherFunction) else None,
    )


def columns_needed(term: RewardTerm) -> list[str]:
    """Return the columns of the rows that a term's function needs by name; empty if it cannot be imported."""
    try:
        function = load_function(term, "", given="rollouts")
    except ConfigError:
        return []
    return needed_columns(function) if is_trl_function(function) else []


def _name_of(term: RewardTerm) -> str:
    return term.kind.partition(":")[2]


def load_function(term: RewardTerm, path: str, *, given: str) -> partial[Any]:
    """Import the function that ``term.kind`` names, and bind ``term.options``; ``given`` is its first argument.

    Raises:
        ConfigError: It cannot be imported, is not callable, or does not take these options.
    """
    if term.python:
        other = OtherFunction(term.kind, term.python, path)
        _check_options(other, term, path, given)
        return partial(other, **term.options)
    try:
        function = getattr(importlib.import_module(term.module), _name_of(term))
    except (Exception, SystemExit) as error:  # a user's module may raise anything, and end its script
        lacks = error.name if isinstance(error, ModuleNotFoundError) else None
        fix = "name a function as module:function, of a module in the current folder or on PYTHONPATH"
        if lacks and not f"{term.module}.".startswith(f"{lacks}."):  # a package that the module imports
            fix = f"install the package of {lacks!r} into {sys.prefix}, or name an interpreter that has it as python"
        said = f"it ends Python with {error}" if isinstance(error, SystemExit) else error
        what = f"cannot import the function {term.kind!r}: {said}"
        raise ConfigError(what, where=f"{path}.kind", fix=fix) from error
    if not callable(function) or _is_of_python(function):
        what = "is Python's own function, and no reward" if callable(function) else "is not a function"
        fix = f"name one such as def reward({given}, **options), which returns a number for each of the {given}"
        raise ConfigError(f"{term.kind!r} {what}", where=f"{path}.kind", fix=fix)
    _check_options(function, term, path, given)
    return partial(function, **term.options)


def _is_of_python(function: Callable[..., Any]) -> bool:
    """Return True if a function is of the standard library, and not of a user's module of the same name."""
    inner = function.func if isinstance(function, partial) else function
    package = (getattr(inner, "__module__", None) or "").partition(".")[0]
    file = getattr(sys.modules.get(package), "__file__", None)
    is_own = file is not None and not Path(file).is_relative_to(sysconfig.get_path("stdlib"))
    return package in sys.stdlib_module_names and not is_own


def _check_options(function: Callable[..., Any], term: RewardTerm, path: str, given: str) -> None:
    if is_trl_function(function):
        _require_named(inspect.signature(function).parameters, term, path)
        return
    if term.python:
        raise ConfigError(
            f"{term.kind!r} has no parameter completions, and {term.python} knows no rollouts",
            where=f"{path}.kind",
            fix=f"write it with TRL's parameters: def {_name_of(term)}(completions, **columns)",
        )
    signature = inspect.signature(function)
    options: Mapping[str, Any] = term.options
    try:
        signature.bind((), **options)
    except TypeError as error:
        raise ConfigError(
            f"{term.kind!r} cannot be called with these options: {error}",
            where=f"{path}.options",
            fix=f"its signature is {_name_of(term)}{signature}; the first argument is the {given}",
        ) from error


def _require_named(parameters: Mapping[str, inspect.Parameter], term: RewardTerm, path: str) -> None:
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return
    if unknown := [name for name in term.options if name not in parameters]:
        raise ConfigError(
            f"{term.kind!r} has no option {unknown[0]!r}",
            where=f"{path}.options",
            fix=f"its signature is {_name_of(term)}({', '.join(map(str, parameters.values()))})",
        )


async def _finished(outcome: Awaitable[Any]) -> Any:
    return await outcome


def function_reward(function: UserFunction, *, name: str = "reward") -> WeightedReward:
    """Build a reward from one Python function; ``name`` is that of its term.

    ``function_reward(lambda rollouts: [float("7" in rollout.text) for rollout in rollouts])``
    """
    return WeightedReward([WeightedTerm(FunctionReward(function, name), 1.0)])


_OURS = ("prompts", "completions", "completion_ids")
_OF_TRAINER = ("trainer_state", "log_extra", "log_metric", "environments", "model", "tokenizer", "processing_class")
_OF_PROMPT = ("reference", "task", "prompt_id", "dataset")


def is_trl_function(function: Callable[..., Any]) -> bool:
    """Return True if a function has a parameter ``completions``, which TRL passes by name."""
    try:
        return "completions" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def trl_function(function: partial[Any], *, name: str, path: str) -> Callable[[Sequence[Rollout]], Any]:
    """Return a function of rollouts that calls one with TRL's parameters, whose options are bound already.

    Raises:
        ConfigError: It needs something of TRL's trainer, or positional parameters.
    """
    parameters = inspect.signature(function).parameters
    _require_servable(parameters, name, path)
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    named = {each for each, found in parameters.items() if found.kind is not found.VAR_KEYWORD}
    needed, bound = needed_columns(function), set(function.keywords)

    @functools.wraps(function.func)
    def served(rollouts: Sequence[Rollout]) -> Any:
        columns = _columns(rollouts, wanted=named - bound)
        if lacks := lacking(needed, columns, name):
            raise RewardError(lacks[0], where=path, fix=lacks[1])
        arguments = {name: value for name, value in {**columns, **_given(rollouts)}.items() if name not in bound}
        return function(**{each: value for each, value in arguments.items() if takes_all or each in named})

    return served


def needed_columns(function: partial[Any]) -> list[str]:
    """Return the columns of the rows that a function with TRL's parameters needs: it has neither default nor option."""
    found = inspect.signature(function).parameters.values()
    needed = (each.name for each in found if each.default is each.empty and each.kind is not each.VAR_KEYWORD)
    return [name for name in needed if name not in (*_OURS, *_OF_PROMPT)]


def lacking(needed: Iterable[str], columns: Collection[str], name: str) -> tuple[str, str] | None:
    """Return the first needed column that rows lack, as an error and its fix; None if they have all."""
    missing = next((each for each in needed if each not in columns), "")
    if not missing:
        return None
    known = ", ".join(sorted(columns)) or "none"
    what = f"the rows have no column {missing!r}, which {name} needs; their columns are {known}"
    return what, f"add the column to the data, or map it: columns = {{ …, {missing} = '…' }}"


def _require_servable(parameters: Mapping[str, inspect.Parameter], name: str, path: str) -> None:
    for each, parameter in parameters.items():
        is_needed = parameter.default is parameter.empty and each in _OF_TRAINER
        if is_needed or parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
            what = f"needs {each!r} of TRL's trainer" if is_needed else f"takes {each!r} by position"
            raise ConfigError(
                f"the reward function {name} {what}, which rlcore does not have",
                where=f"{path}.kind",
                fix=f"give {each} a default, or write the function for rollouts: def {name}(rollouts)",
            )


def _given(rollouts: Sequence[Rollout]) -> dict[str, list[Any]]:
    return {
        "prompts": [_prompt(rollout.prompt) for rollout in rollouts],
        "completions": [_completion(rollout) for rollout in rollouts],
        "completion_ids": [list(rollout.completion_ids) for rollout in rollouts],
    }


def _columns(rollouts: Sequence[Rollout], *, wanted: set[str]) -> dict[str, list[Any]]:
    rows = [rollout.row for rollout in rollouts]
    names = dict.fromkeys(name for row in rows for name in row)
    own = {each: [getattr(rollout.prompt, each) for rollout in rollouts] for each in _OF_PROMPT if each in wanted}
    return own | {name: [row.get(name) for row in rows] for name in names}


def _prompt(prompt: Prompt) -> str | list[dict[str, str]]:
    if prompt.form == "text":
        return prompt.messages[-1].content
    return [{"role": message.role, "content": message.content} for message in prompt.messages]


def _completion(rollout: Rollout) -> str | list[dict[str, str]]:
    if rollout.prompt.form == "text":
        return rollout.transcript if rollout.tool_calls else rollout.text
    calls = [
        turn
        for call in rollout.tool_calls
        for turn in ({"role": "assistant", "content": call.text}, {"role": "tool", "content": call.output})
    ]
    return [*calls, {"role": "assistant", "content": rollout.text}]
