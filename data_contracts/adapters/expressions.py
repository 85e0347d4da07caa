"""Mappings of columns: their targets, and expressions that read a value of a row. They run no code.

problem                     the column
extra_info.answer           a nested value; a number picks an item of a list: messages.0.content, answers.-1
answers.*.rank              of each item of a list
solution|boxed              a column through a filter, see FILTERS
system?                     a column that may be missing or null
{question}\\n\\n{choices|letters}   a text with values in it; {{ and }} are braces
=math                       a constant; numbers and booleans are constants too
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal

from rlcore.data_contracts.errors import LeftOutError, RowError
from rlcore.data_contracts.gate.strict_json import parse_value

Row = Mapping[str, Any]
Scalar = str | int | float | bool
Number = int | float | Decimal  # Parquet and Arrow have decimals

_FIELD = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")
_INDEX = re.compile(r"-?\d+")
_TRANSCRIPT = re.compile(r"\n\n(Human|Assistant): ?")
_EXTRA_ID = re.compile(r"\n?<extra_id_1>(User|Assistant)\n")
_SPEAKERS = {"Human": "user", "User": "user", "Assistant": "assistant"}
_GROUPED = re.compile(r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?!,?\d)")
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_MOST_LISTED = 40  # columns in a message


@dataclass(frozen=True, kw_only=True, slots=True)
class Expression:
    """A parsed expression: its text, the columns that it reads, and the function that reads a row."""

    written: str
    columns: tuple[str, ...]
    read: Callable[[Row], Any]


def parse(value: Scalar) -> Expression:
    """Parse an expression.

    Raises:
        ValueError: it is malformed, or names an unknown filter.
    """
    if not isinstance(value, str):
        return Expression(written=str(value), columns=(), read=lambda row: value)
    if value.startswith("="):
        return Expression(written=value, columns=(), read=lambda row: value[1:])
    return _template(value) if "{" in value or "}" in value else _path(value)


def describe_missing(name: str, names: Sequence[str]) -> str:
    """Return the reason why a column is missing, with the nearest name and all that there are."""
    close = difflib.get_close_matches(name, names, n=1) or [one for one in names if one.casefold() == name.casefold()]
    nearest = f"; did you mean {close[0]!r}?" if close else ""
    shown = sorted(names)[:_MOST_LISTED]
    more = ", …" if len(names) > len(shown) else ""
    return f"missing column {name!r}{nearest}; there are {', '.join(shown) or 'none'}{more}"


def kind_of(value: object) -> str:
    """Return the type of a value in words."""
    names = {type(None): "null", bool: "a boolean", str: "a text", list: "a list"}
    names |= dict.fromkeys((int, float, Decimal), "a number")
    return names.get(type(value), "an object" if isinstance(value, Mapping) else type(value).__name__)


def number_text(value: Number) -> str:
    """Return a finite number as text: 27, 27.0 and a decimal 27.00 are ``27``, as in a column where one is null."""
    if isinstance(value, Decimal):
        text = f"{value:f}"
        return text.rstrip("0").rstrip(".") if "." in text else text
    return str(int(value) if isinstance(value, float) and value.is_integer() else value)


def _path(written: str) -> Expression:
    path, *names = (part.strip() for part in written.split("|"))
    is_optional = path.endswith("?")
    path = path.removesuffix("?")
    if not path or any(not part for part in path.split(".")):
        raise ValueError(f"{written!r} names no column")
    unknown = [name for name in names if name not in FILTERS]
    if unknown:
        raise ValueError(f"{written!r}: there is no filter {unknown[0]!r}; there are {', '.join(FILTERS)}")

    def read(row: Row) -> Any:
        value = _value(row, path, is_optional)
        for name in names if value is not None else ():
            value = FILTERS[name](value, path)
        return value

    return Expression(written=written, columns=(path,), read=read)


def _template(written: str) -> Expression:
    pieces: list[str | Expression] = []
    end = 0
    for match in _FIELD.finditer(written):
        pieces.append(written[end : match.start()])
        end = match.end()
        if match[1] is not None:
            pieces.append(_path(match[1]))
        elif len(match[0]) == 2:
            pieces.append(match[0][0])
        else:
            raise ValueError(f"{written!r} has a single brace: write {{column}}, or {{{{ and }}}} for braces")
    pieces.append(written[end:])

    def read(row: Row) -> str:
        texts = [one if isinstance(one, str) else _text_in(one.read(row), one.columns[0]) for one in pieces]
        return "".join(texts).strip()

    columns = [column for one in pieces if isinstance(one, Expression) for column in one.columns]
    return Expression(written=written, columns=tuple(columns), read=read)


def _text_in(value: object, path: str) -> str:
    if value is None:
        return ""
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return "\n".join(value)
    if isinstance(value, bool) or not isinstance(value, str | Number):
        raise RowError(path, f"must be a text, a number or a list of texts, not {kind_of(value)}", value)
    return str(value)


def _value(row: Row, path: str, is_optional: bool) -> Any:
    if path in row:  # also a column with dots in its name
        return _inside(row[path], (), path, is_optional)
    first = path.partition(".")[0]
    if first not in row:
        if is_optional:
            return None
        raise RowError(first, describe_missing(first, list(row)))
    return _inside(row[first], path.split(".")[1:], first, is_optional)


def _inside(value: Any, parts: Sequence[str], done: str, is_optional: bool) -> Any:
    if value is None and not is_optional:
        raise RowError(done, "is null; a mapping allows that by a ? behind the column")
    if not parts or value is None:
        return value
    part, *rest = parts
    if part == "*":
        if not isinstance(value, list):
            raise RowError(done, f"must be a list, not {kind_of(value)}", value)
        return [_inside(one, rest, f"{done}.{place}", is_optional) for place, one in enumerate(value)]
    if isinstance(value, list) and _INDEX.fullmatch(part):
        if not -len(value) <= int(part) < len(value):
            raise RowError(done, f"has {len(value)} items, and no item {part}", value)
        return _inside(value[int(part)], rest, f"{done}.{part}", is_optional)
    if not isinstance(value, Mapping):
        raise RowError(done, f"must be an object with {part!r}, not {kind_of(value)}", value)
    if part not in value:
        if is_optional:
            return None
        raise RowError(f"{done}.{part}", describe_missing(part, list(value)), value)
    return _inside(value[part], rest, f"{done}.{part}", is_optional)


def _boxed(value: Any, path: str) -> str:
    text = _text(value, path)
    start = text.rfind("\\boxed")
    rest = text[start + len("\\boxed") :].lstrip() if start >= 0 else ""
    depth = 0
    for place, character in enumerate(rest):
        escaped = place > 0 and rest[place - 1] == "\\"
        depth += ((character == "{") - (character == "}")) * (not escaped)
        if depth == 0:
            if place and rest[1:place].strip():
                return rest[1:place].strip()
            break
    raise RowError(path, r"has no answer in a closed \boxed{}", text[-200:])


def _hashes(value: Any, path: str) -> str:
    text = _text(value, path)
    _, marker, answer = text.rpartition("####")
    if not marker or not answer.strip():
        raise RowError(path, "has no final answer after '####'", text[-200:])
    plain = _GROUPED.sub(lambda number: number[0].replace(",", ""), answer.strip())
    if re.search(r"\d,\d", plain):
        raise RowError(path, "has a comma that separates no thousands; write a decimal point", answer.strip())
    return plain


def _worked(value: Any, path: str) -> str:
    text = _text(value, path)
    return f"{re.sub('<<[^<>]*>>', '', text.rpartition('####')[0]).strip()}\n#### {_hashes(text, path)}"


def _transcript(value: Any, path: str) -> list[dict[str, str]]:
    r"""Split ``\n\nHuman: …\n\nAssistant: …`` into turns; an open last turn of the Assistant is none."""
    text = _text(value, path)
    before, *parts = _TRANSCRIPT.split(text)
    if before.strip() or len(parts) < 2:
        raise RowError(path, "is no transcript of Human and Assistant", text)
    return _turns(parts)


def _extra_id(value: Any, path: str) -> list[dict[str, str]]:
    return _turns(["User", *_EXTRA_ID.split(_text(value, path))])


def _turns(parts: Sequence[str]) -> list[dict[str, str]]:
    turns = [
        {"role": _SPEAKERS[speaker], "content": words.strip()}
        for speaker, words in zip(parts[::2], parts[1::2], strict=True)
    ]
    is_open = turns[-1] == {"role": "assistant", "content": ""}
    return turns[:-1] if is_open else turns


def _json(value: Any, path: str) -> Any:
    try:
        return parse_value(_text(value, path))
    except ValueError as error:
        raise RowError(path, f"is no JSON: {str(error)[:100]}", value) from error


def _only(value: Any, path: str) -> Any:
    """Return the item of a list of one; of several turns, the answers before the last one differ."""
    if not isinstance(value, list) or not value:
        raise RowError(path, f"must be a list with an item, not {kind_of(value)}", value)
    if len(value) > 1:
        raise LeftOutError(path, "has several turns, and the answers before the last one differ", value)
    return value[0]


def _commas(value: Any, path: str) -> str:
    if not isinstance(value, list) or any(type(one) is not int for one in value):
        raise RowError(path, f"must be a list of whole numbers, not {kind_of(value)}", value)
    return ", ".join(map(str, value))


def _lettered(value: Any, path: str) -> str:
    if not isinstance(value, list) or len(value) > len(_LETTERS):
        raise RowError(path, f"must be a list of at most {len(_LETTERS)} choices, not {kind_of(value)}", value)
    return "\n".join(f"{letter}. {_text_in(one, path)}" for letter, one in zip(_LETTERS, value, strict=False))


def _letter(value: Any, path: str) -> str:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < len(_LETTERS):
        raise RowError(path, f"must be the number of a choice, from 0, not {kind_of(value)}", value)
    return _LETTERS[value]


def _text(value: Any, path: str) -> str:
    if not isinstance(value, str):
        raise RowError(path, f"must be a text, not {kind_of(value)}", value)
    return value


FILTERS: Mapping[str, Callable[[Any, str], Any]] = {
    "boxed": _boxed,
    "hashes": _hashes,
    "worked": _worked,
    "transcript": _transcript,
    "extra_id": _extra_id,
    "json": _json,
    "only": _only,
    "commas": _commas,
    "letters": _lettered,
    "letter": _letter,
}
"""Filters of a value, by name: functions of the value and its path."""


Kind = Literal["prompts", "demonstrations", "preferences"]
Spec = Mapping[str, Expression]

_COMMON = {
    "prompt": "the question as a text, or the conversation",
    "system": "the system prompt, where the conversation has none",
    "history": "earlier turns, a list of [question, answer] pairs",
    "id": "the row's name; without it, a hash of its content",
    "split": "`train` or `eval`",
}
_ANSWERED = {"reference": "the reference answer", "task": "the family of problems"}
TARGETS: Mapping[Kind, Mapping[str, str]] = {
    "prompts": {**_COMMON, **_ANSWERED},
    "demonstrations": {
        **_COMMON,
        **_ANSWERED,
        "completion": "the answer; without it, the last turn of the conversation",
    },
    "preferences": {
        **_COMMON,
        "chosen": "the better answer, alone or behind its conversation",
        "rejected": "the worse answer",
        "score_chosen": "a number that must not be below `score_rejected`",
        "score_rejected": "a number; an equal one is a tie",
        "response_a": "one of two answers whose order does not count",
        "response_b": "the other answer",
        "score_a": "a number; the higher one wins",
        "score_b": "a number; an equal one is a tie",
        "winner": "the name of the winner; anything but the next two is a tie",
        "winner_a": "the value of `winner` for `response_a`",
        "winner_b": "the value of `winner` for `response_b`",
        "responses": "a list of answers",
        "scores": "a list of numbers; higher is better",
        "ranks": "a list of numbers; lower is better",
        "completion": "one answer a row; rows with equal prompts are compared",
        "score": "its score, a number or a boolean",
        "min_gap": "scores that differ by no more are ties (default 0)",
        "ties": "`leave_out` (default: listed, not counted) or `refuse`",
        "margin": "the required lead of the better answer, in units of reward",
        "probability": "that the label is right",
        "source": "the origin of the pair",
    },
}
# Sets of targets of preferences, one of which a mapping has.
_FORMS = (
    ("chosen", "rejected"),
    ("response_a", "response_b", "score_a", "score_b"),
    ("response_a", "response_b", "winner", "winner_a", "winner_b"),
    ("responses", "scores"),
    ("responses", "ranks"),
    ("completion", "score"),
)
_LIKE = 0.75  # of difflib


def parse_columns(columns: Mapping[str, Scalar], kind: Kind) -> Spec:
    """Parse a mapping. Other keys than targets name columns that reach the rewards; only prompts have such.

    Raises:
        ValueError: with all errors, a line each.
    """
    spec: dict[str, Expression] = {}
    errors: list[str] = []
    for target, value in columns.items():
        try:
            spec[target] = parse(value)
        except ValueError as error:
            errors.append(f"{target}: {error}")
    errors += [*_unknown(columns, kind), *_missing(set(columns), kind)]
    if errors:
        raise ValueError("\n".join(errors))
    return spec


def _unknown(names: Collection[str], kind: Kind) -> list[str]:
    known = TARGETS[kind]
    found = []
    for name in names:
        close = difflib.get_close_matches(name, [one for one in known if one not in names], n=1, cutoff=_LIKE)
        if name not in known and (close or kind != "prompts"):
            hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(known)}"
            found.append(f"{name}: is no target of {kind}; {hint}")
    return found


def _missing(names: set[str], kind: Kind) -> list[str]:
    if kind != "preferences":
        return [] if "prompt" in names else ["prompt: is missing; it names the column of the question"]
    if any(names.issuperset(form) for form in _FORMS):
        is_bare = not {"prompt", "chosen"} & names and not {"response_a"} <= names
        return ["prompt: is missing; it names the column of the question"] if is_bare else []
    forms = "; or ".join(", ".join(form) for form in _FORMS)
    return [f"the pair: name {forms}"]
