"""Readers of one field of a source row, which check its type; conversations in the spellings of public data."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Any

from rlcore.data_contracts.adapters.expressions import Number, Row, describe_missing, kind_of
from rlcore.data_contracts.contracts.column_checks import SPLITS
from rlcore.data_contracts.errors import LeftOutError, RowError

Messages = list[dict[str, str]]
_LIKE = 0.8  # of difflib: one letter missing, added or swapped in a word of five


def text(row: Row, name: str) -> str:
    """Return the text in field ``name``, which may be empty.

    Raises:
        RowError: missing, or not a text.
    """
    value = _present(row, name)
    if not isinstance(value, str):
        raise RowError(name, f"must be a text, not {kind_of(value)}", value)
    return value


def number(row: Row, name: str) -> float:
    """Return the finite number in field ``name``.

    Raises:
        RowError: missing, not a number (a boolean is none), or not finite.
    """
    value = _present(row, name)
    if isinstance(value, bool) or not isinstance(value, Number):
        raise RowError(name, f"must be a number, not {kind_of(value)}", value)
    try:
        converted = float(value)
    except OverflowError as error:
        raise RowError(name, "is beyond the range of a float", value) from error
    if not math.isfinite(converted):
        raise RowError(name, "must be finite", value)
    return converted


def items(row: Row, name: str) -> list[Any]:
    """Return the list in field ``name``.

    Raises:
        RowError: missing, or not a list.
    """
    value = _present(row, name)
    if not isinstance(value, list):
        raise RowError(name, f"must be a list, not {kind_of(value)}", value)
    return value


def messages(row: Row, name: str = "messages") -> Messages:
    """Return the conversation in field ``name``: objects with ``role`` and ``content``, both texts; null keys are none.

    Raises:
        RowError: naming the message and its field, ``messages.2.role``.
    """
    return [_message(turn, name, place) for place, turn in enumerate(items(row, name))]


def split_of(value: object) -> dict[str, str]:
    """Return the side of a row: ``{"split": "train"}``, or nothing for null.

    Raises:
        RowError: neither ``train`` nor ``eval``.
    """
    if value is None:
        return {}
    if not isinstance(value, str) or value not in SPLITS:
        raise RowError("split", "must be 'train' or 'eval'", value)
    return {"split": value}


def refuse_misspelt(row: Row, names: Collection[str]) -> None:
    """Reject a field that is nearly one of the optional ``names``: its value would be lost silently.

    Raises:
        RowError: naming the field and its probable meaning.
    """
    for field, meant in _misspelt(tuple(row), tuple(names)):
        raise RowError(field, f"is no field of the contract; {meant!r} is: rename it, or leave it out", row[field])


@lru_cache(maxsize=64)
def _misspelt(fields: tuple[str, ...], names: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return the fields that are nearly an absent name, with that name. Most rows have the fields of the row before.

    A name without its ``_id`` is another column: ``prompt`` is a text.
    """
    absent = [name for name in names if name not in fields and name.removesuffix("_id") not in fields]
    found = ((one, difflib.get_close_matches(one.strip().casefold(), absent, n=1, cutoff=_LIKE)) for one in fields)
    return sorted((one, meant[0]) for one, meant in found if meant and one not in names)


def refuse_other_contract(row: Row, contract: str) -> None:
    """Reject a row that declares another contract or version.

    Raises:
        RowError: naming both.
    """
    if "contract" in row and row["contract"] != contract:
        reason = f"the row is of another contract: these rows are read as {contract}"
        raise RowError("contract", reason, row["contract"])


def single_question(question: str) -> Messages:
    """Return a conversation of one question."""
    return [{"role": "user", "content": question}]


def _message(turn: object, field: str, place: int) -> dict[str, str]:
    if type(turn) is dict and len(turn) == 2:  # the common case; the slower path below finds the reason
        role, content = turn.get("role"), turn.get("content")
        if isinstance(role, str) and isinstance(content, str):
            return {"role": role, "content": content}
    path = f"{field}.{place}"
    if not isinstance(turn, Mapping) or {each for each in turn if turn[each] is not None} - {"role", "content"}:
        raise RowError(path, "must be an object with exactly 'role' and 'content'", turn)
    for name in ("role", "content"):
        if name not in turn:
            raise RowError(path, "must be an object with exactly 'role' and 'content'", turn)
        if not isinstance(turn[name], str):
            raise RowError(f"{path}.{name}", f"must be a text, not {kind_of(turn[name])}", turn[name])
    return {"role": turn["role"], "content": turn["content"]}


def _present(row: Row, name: str) -> Any:
    if name not in row:
        raise RowError(name, describe_missing(name, list(row)))
    return row[name]


_SPELLINGS = (("role", "content"), ("from", "value"))
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
}
_CALLS = ("tool_calls", "function_call", "tool_call_id")  # their turns mean more than their text


def conversation(value: Any, path: str) -> Messages:
    """Return a text as the user's question, and a list of turns with our roles; a blank system turn is none.

    Raises:
        RowError: neither, an unknown role, a turn with a tool call or without a text.
    """
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise RowError(path, f"must be a text or a list of turns, not {kind_of(value)}", value)
    if value and all(isinstance(one, str) for one in value):
        return _alternating(value, path)
    turns = [_turn(one, f"{path}.{place}") for place, one in enumerate(value)]
    has_no_system = bool(turns) and turns[0]["role"] == "system" and not turns[0]["content"].strip()
    return turns[has_no_system:]


def history(value: Any, path: str) -> Messages:
    """Return the turns of earlier [question, answer] pairs; none for null.

    Raises:
        RowError: it is something else.
    """
    pairs = [] if value is None else value
    is_list = isinstance(pairs, list) and all(isinstance(each, list) and len(each) == 2 for each in pairs)
    if not is_list or not all(isinstance(text, str) for pair in pairs for text in pair):
        raise RowError(path, "must be a list of [question, answer] pairs of texts", value)
    roles = ("user", "assistant")
    return [{"role": role, "content": text} for pair in pairs for role, text in zip(roles, pair, strict=True)]


def is_conversation(value: object) -> bool:
    """Return True for a nonempty list of turns."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(one, Mapping) and any(role in one for role, _ in _SPELLINGS) for one in value)
    )


def question_of(turns: Messages, path: str) -> Messages:
    """Return a conversation up to the user's last turn.

    Raises:
        RowError: the user has no turn.
    """
    ends = [place for place, turn in enumerate(turns) if turn["role"] == "user"]
    if not ends:
        raise RowError(path, "has no turn of the user", turns)
    return turns[: ends[-1] + 1]


def answered(turns: Messages, path: str) -> tuple[Messages, str]:
    """Divide a conversation into the part before its last answer, and that answer.

    Raises:
        RowError: it does not end with one.
    """
    if not turns or turns[-1]["role"] != "assistant":
        raise RowError(path, "does not end with an assistant's answer", turns[-1:])
    return turns[:-1], turns[-1]["content"]


def answer_of(value: Any, path: str) -> tuple[Messages, str]:
    """Return an answer and the turns before it, if its column has them."""
    return ([], value) if isinstance(value, str) else answered(conversation(value, path), path)


def continued(given: Messages, own: Messages) -> Messages:
    """Return the question of an answer whose column has turns ``own`` before it, and the question's column ``given``.

    ``own`` repeats the question, or its end without the system turn, or continues it.
    """
    if not own or given[-len(own) :] == own:
        return given
    starts = range(len(own) - len(given) + 1)
    if any(own[start : start + len(given)] == given for start in starts):
        return own
    is_rest = own[0]["role"] == "assistant" or all(turn["role"] == "system" for turn in given)
    return [*given, *own] if is_rest else own


def divided(first: str, second: str, path: str) -> tuple[str, str, str]:
    """Divide two texts that begin alike into the shared part, up to the end of a word, and the rest of each.

    Raises:
        LeftOutError: they share no word.
    """
    end = next((place for place, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), 0)
    end = max((place for place in range(end) if first[place].isspace()), default=0)
    if not first[:end].strip():
        raise LeftOutError(path, "the answers share no beginning, so there is no prompt", second)
    return first[:end], first[end:].lstrip(), second[end:].lstrip()


def _alternating(texts: list[str], path: str) -> Messages:
    """Return turns of the user. A second one has lost the answer between them."""
    if len(texts) > 1:
        raise LeftOutError(path, "has several turns of the user without the answers between them", texts)
    return [{"role": "user", "content": texts[0]}]


def _turn(turn: Any, path: str) -> dict[str, str]:
    if not isinstance(turn, Mapping):
        raise RowError(path, f"must be an object with 'role' and 'content', not {kind_of(turn)}", turn)
    there = [each for each in _SPELLINGS if each[0] in turn]
    if not there:
        names = ", ".join(map(str, turn)) or "none"
        raise RowError(path, f"must have 'role' and 'content'; there are {names}", dict(turn))
    role, content = min(there, key=lambda each: turn[each[0]] is None)  # in a table, turns have the keys of all
    return {"role": _role(turn[role], f"{path}.{role}"), "content": _content(turn, content, path)}


def _role(value: Any, path: str) -> str:
    if not isinstance(value, str) or value.casefold() not in _ROLES:
        raise RowError(path, f"must be one of {', '.join(_ROLES)}", value)
    return _ROLES[value.casefold()]


def _content(turn: Mapping[str, Any], name: str, path: str) -> str:
    calls = [call for call in _CALLS if turn.get(call)]
    if calls:
        raise RowError(f"{path}.{calls[0]}", "calls a tool, which a text cannot hold", turn[calls[0]])
    value = turn.get(name)
    if isinstance(value, list):  # parts of a message
        kinds = [part.get("type") if isinstance(part, Mapping) else None for part in value]
        if any(kind != "text" for kind in kinds):
            raise RowError(f"{path}.{name}", "must have parts of type 'text' only", kinds)
        value = "".join(str(part["text"]) for part in value)
    if not isinstance(value, str):
        raise RowError(f"{path}.{name}", f"must be a text, not {kind_of(value)}", value)
    return value
