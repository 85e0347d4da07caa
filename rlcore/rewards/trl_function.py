"""Functions with TRL's parameters as rewards: ``prompts``, ``completions``, and the columns of the rows by name.

    def accuracy(completions, solution, **columns) -> list[float | None]: ...

As in TRL, everything is passed by name. ``prompts`` and ``completions`` are texts if the source has its questions as
texts, else lists of messages. Each column is a list with one value per completion. None means that the reward does not
apply to a completion.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from rlcore.errors import ConfigError, RewardError
from rlcore.types import Prompt, Rollout

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
    """Return the columns of all rows, null where a row has none, and those of a prompt that the function names."""
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
