"""Checks of one column for several contracts: from a series to a boolean per row."""

from __future__ import annotations

import math

import pandas as pd

from rlcore.data_contracts.characters import has_visible

SPLITS = ("train", "eval")
ROLES = ("system", "user", "assistant")
FINISH_REASONS = ("stop", "length")


def is_filled(texts: pd.Series) -> pd.Series:
    """Check for visible text without NUL characters."""
    return texts.map(_is_filled_text).astype(bool)


def is_empty_or_filled(texts: pd.Series) -> pd.Series:
    """Check for empty or visible text."""
    return texts.map(lambda text: text == "" or _is_filled_text(text)).astype(bool)


def is_split(values: pd.Series) -> pd.Series:
    """Check for ``train`` or ``eval``."""
    return values.isin(SPLITS)


def is_finish_reason(values: pd.Series) -> pd.Series:
    """Check for ``stop`` or ``length``."""
    return values.isin(FINISH_REASONS)


def is_question(conversations: pd.Series) -> pd.Series:
    """Check for a conversation that ends with the user's turn: see :func:`_is_question`."""
    return conversations.map(_is_question).astype(bool)


def is_question_with_calls(conversations: pd.Series) -> pd.Series:
    """Check for a question, optionally followed by tool calls: pairs of an assistant's and a tool's turn."""
    return conversations.map(lambda conversation: _is_question(_without_calls(conversation))).astype(bool)


def is_list_of_texts(values: pd.Series) -> pd.Series:
    """Check for a list of at least two visible texts."""
    return values.map(
        lambda value: isinstance(value, list) and len(value) > 1 and all(_is_filled_text(item) for item in value)
    ).astype(bool)


def is_list_of_counts(values: pd.Series) -> pd.Series:
    """Check for a nonempty list of integers from 0."""
    return values.map(
        lambda value: isinstance(value, list) and set(map(type, value)) == {int} and min(value) >= 0
    ).astype(bool)


def is_list_of_booleans(values: pd.Series) -> pd.Series:
    """Check for a list of booleans."""
    return values.map(lambda value: isinstance(value, list) and set(map(type, value)) <= {bool}).astype(bool)


def is_list_of_logprobs(values: pd.Series) -> pd.Series:
    """Check for a list of finite numbers that are at most 0, up to the rounding of a float32 softmax (1e-6)."""
    return values.map(
        lambda value: (
            isinstance(value, list)
            and set(map(type, value)) <= {float}
            and all(map(math.isfinite, value))
            and max(value, default=0.0) <= 1e-6
        )
    ).astype(bool)


def _without_calls(conversation: object) -> object:
    """Return a conversation up to the first tool call after the user's last turn."""
    while isinstance(conversation, list) and len(conversation) > 2 and _is_call(conversation[-2:]):
        conversation = conversation[:-2]
    return conversation


def _is_call(turns: list[object]) -> bool:
    whole = [turn for turn in turns if isinstance(turn, dict) and set(turn) == {"role", "content"}]
    roles = [turn["role"] for turn in whole if _is_filled_text(turn["content"])]
    return roles == ["assistant", "tool"]


def _is_question(conversation: object) -> bool:
    """Check for an optional system message, then nonblank turns, the last of them the user's."""
    if not isinstance(conversation, list) or not conversation:
        return False
    if not all(isinstance(turn, dict) and set(turn) == {"role", "content"} for turn in conversation):
        return False
    roles = [turn["role"] for turn in conversation]
    return (
        roles[-1] == "user"
        and "system" not in roles[1:]
        and all(role in ROLES for role in roles)
        and all(_is_filled_text(turn["content"]) for turn in conversation)
    )


def _is_filled_text(value: object) -> bool:
    return isinstance(value, str) and "\0" not in value and has_visible(value)
