"""Rules of single columns for several contracts, and checks: from a series to a boolean per row."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pandas as pd
import pandera.pandas as pa

from rlcore.data_contracts.characters import has_visible

SPLITS = ("train", "eval")
ROLES = ("system", "user", "assistant")
FINISH_REASONS = ("stop", "length")


def rule(check: Callable[[Any], pd.Series], *columns: str, error: str) -> Any:
    """Return a rule of a pandera model: ``check`` maps each of the columns, or the frame, to a boolean per row."""
    decorate = pa.check(*columns, error=error) if columns else pa.dataframe_check(error=error)
    return decorate(classmethod(lambda _, values: check(values)))


def each(test: Callable[[Any], bool], *columns: str, error: str) -> Any:
    """Return a rule of each value of the columns."""
    return rule(lambda values: values.map(test).astype(bool), *columns, error=error)


def filled(*columns: str) -> Any:
    """Return the rule of visible text without NUL characters."""
    return each(is_filled, *columns, error="must not be blank")


def empty_or_filled(*columns: str) -> Any:
    """Return the rule of empty or visible text."""
    error = "must be empty or something that a reader sees"
    return each(lambda text: text == "" or is_filled(text), *columns, error=error)


def known_split(*columns: str) -> Any:
    """Return the rule of ``train`` or ``eval``."""
    return rule(lambda values: values.isin(SPLITS), *columns, error="must be 'train' or 'eval'")


def known_finish_reason(*columns: str) -> Any:
    """Return the rule of ``stop`` or ``length``."""
    return rule(lambda values: values.isin(FINISH_REASONS), *columns, error="must be 'stop' or 'length'")


def question(*columns: str) -> Any:
    """Return the rule of a conversation that ends with the user's turn: see :func:`is_question`."""
    error = "must be filled turns of system, user and assistant, the user's last"
    return each(is_question, *columns, error=error)


def is_question_with_calls(conversation: object) -> bool:
    """Return True for a question, optionally followed by tool calls: pairs of an assistant's and a tool's turn."""
    return is_question(_without_calls(conversation))


def is_list_of_counts(value: Any) -> bool:
    """Return True for a nonempty list of integers from 0."""
    return isinstance(value, list) and set(map(type, value)) == {int} and min(value) >= 0


def is_list_of_booleans(value: Any) -> bool:
    """Return True for a list of booleans."""
    return isinstance(value, list) and set(map(type, value)) <= {bool}


def is_list_of_logprobs(value: Any) -> bool:
    """Return True for a list of finite numbers that are at most 0, up to the rounding of a float32 softmax (1e-6)."""
    is_list = isinstance(value, list) and set(map(type, value)) <= {float}
    return is_list and all(map(math.isfinite, value)) and max(value, default=0.0) <= 1e-6


def _without_calls(conversation: object) -> object:
    while isinstance(conversation, list) and len(conversation) > 2 and _is_call(conversation[-2:]):
        conversation = conversation[:-2]
    return conversation


def _is_call(turns: list[object]) -> bool:
    whole = [turn for turn in turns if isinstance(turn, dict) and set(turn) == {"role", "content"}]
    roles = [turn["role"] for turn in whole if is_filled(turn["content"])]
    return roles == ["assistant", "tool"]


def is_question(conversation: object) -> bool:
    """Return True for an optional system message, then nonblank turns, the last of them the user's."""
    if not isinstance(conversation, list) or not conversation:
        return False
    if not all(isinstance(turn, dict) and set(turn) == {"role", "content"} for turn in conversation):
        return False
    roles = [turn["role"] for turn in conversation]
    return (
        roles[-1] == "user"
        and "system" not in roles[1:]
        and all(role in ROLES for role in roles)
        and all(is_filled(turn["content"]) for turn in conversation)
    )


def is_filled(value: object) -> bool:
    """Return True for visible text without NUL characters."""
    return isinstance(value, str) and "\0" not in value and has_visible(value)
