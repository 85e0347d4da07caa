"""Conversations as public data has them: a text, lists of turns in several spellings, answers at their end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlcore.data_contracts.adapters.expressions import kind_of
from rlcore.data_contracts.adapters.fields import Messages
from rlcore.data_contracts.errors import LeftOutError, RowError

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
