"""Declared adapters: source rows to contract rows by a mapping of columns (``docs/layouts.md`` lists ready ones)."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from rlcore.data_contracts.adapters.expressions import (
    TARGETS,
    Kind,
    Number,
    Row,
    Scalar,
    Spec,
    kind_of,
    number_text,
    parse_columns,
)
from rlcore.data_contracts.adapters.fields import (
    Messages,
    answer_of,
    answered,
    continued,
    conversation,
    divided,
    history,
    question_of,
    split_of,
)
from rlcore.data_contracts.adapters.gathering import GATHERED, gather_answers
from rlcore.data_contracts.contracts.datasets import expand, single
from rlcore.data_contracts.errors import LEFT_OUT, LeftOutError, RowError, RowValueError
from rlcore.data_contracts.gate.reading import Source
from rlcore.data_contracts.gate.records import canonical_json

_NO_ANSWER = re.compile(r"proofs?|not ?found|n/?a|null|nan|none|unknown|no answer", re.IGNORECASE)
_BOOLEANS: Mapping[Any, int] = {"True": 1, "true": 1, "False": 0, "false": 0}
_CHOICE = re.compile(r"^([A-Z])\. ", re.MULTILINE)
RowFn = Callable[[Row], list[dict[str, Any]]]
Gather = Callable[[Source], Source]


def declared(columns: Mapping[str, Scalar], kind: Kind, *, name: str) -> tuple[RowFn, Gather | None]:
    """Return the function of rows that a mapping declares, and the source that it reads if that is not the rows' own.

    ``name`` begins ids and is the default of ``task`` and ``source``.

    Raises:
        ValueError: the mapping is malformed.
    """
    spec = parse_columns(columns, kind)
    if kind == "preferences" and "completion" in spec:
        others = {target: value for target, value in columns.items() if target in ("min_gap", "ties")}
        return declared({**GATHERED, **others}, kind, name=name)[0], partial(gather_answers, spec)
    make = {"prompts": _prompt_rows, "demonstrations": _demonstration_rows, "preferences": _preference_rows}[kind]
    return partial(make, spec, name), None


def extra_columns(columns: Mapping[str, Scalar]) -> Callable[[Row], list[dict[str, Any]]]:
    """Return the function that reads the keys of a mapping of prompts that are no targets, for rewards."""
    spec = parse_columns(columns, "prompts")
    extra = {name: each for name, each in spec.items() if name not in TARGETS["prompts"]}
    return lambda row: [{name: each.read(row) for name, each in extra.items()}]


def row_id(name: str, question: Messages, *answers: str) -> str:
    """Return an id derived from the content, for rows that have none."""
    turns = [f"{turn['role']}\n{turn['content']}" for turn in question]
    return f"{name}-{hashlib.sha256(chr(0).join([*turns, *answers]).encode()).hexdigest()[:16]}"


def reference_text(value: Any, path: str) -> str:
    """Return a reference answer as text: 27 and 27.0 are ``27``, an object its JSON, several answers a JSON list.

    Raises:
        RowError: it is nothing of this, or says that there is no answer.
    """
    if isinstance(value, list) and value:
        accepted = list(dict.fromkeys(_answer_text(each, path) for each in value))
        return accepted[0] if len(accepted) == 1 else json.dumps(accepted, ensure_ascii=False)
    return canonical_json(value).decode() if isinstance(value, Mapping) else _answer_text(value, path)


def _answer_text(value: Any, path: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | Number):
        raise RowError(path, f"must be a text, a number or a list of them, not {kind_of(value)}", value)
    if isinstance(value, float) and not math.isfinite(value):
        raise RowError(path, "must be finite", value)
    text = value if isinstance(value, str) else number_text(value)
    if _NO_ANSWER.fullmatch(text.strip()):
        raise RowValueError(path, "is no answer, so it cannot be a reference", text)
    return text


def _prompt_rows(spec: Spec, name: str, row: Row) -> list[dict[str, Any]]:
    question = _with_system(spec, row, question_of(_asked(spec, row), _path(spec, "prompt")))
    made: dict[str, Any] = {"messages": question, **_answered(spec, name, row), **_split(spec, row)}
    return [{"prompt_id": _id(spec, row) or row_id(made["task"], question), **made}]


def _demonstration_rows(spec: Spec, name: str, row: Row) -> list[dict[str, Any]]:
    turns = _asked(spec, row)
    if "completion" in spec:
        own, completion = answer_of(spec["completion"].read(row), _path(spec, "completion"))
        turns = continued(turns, own)
    else:
        turns, completion = answered(turns, _path(spec, "prompt"))
    question = _with_system(spec, row, turns)
    answer: dict[str, Any] = {"completion": completion, **_answered(spec, name, row)}
    made = {"messages": question, **answer, **_split(spec, row)}
    return [{"demonstration_id": _id(spec, row) or row_id(made["task"], question, completion), **made}]


def _preference_rows(spec: Spec, name: str, row: Row) -> list[dict[str, Any]]:
    if "responses" in spec:
        pairs = _ranking(spec, name, row)
    else:
        question, chosen, rejected = _sides(spec, row)
        question = _with_system(spec, row, question)
        found = _id(spec, row) or row_id(name, question, chosen, rejected)
        source = _text(spec, row, "source") or name
        pairs = [{**single(found), "messages": question, "chosen": chosen, "rejected": rejected, "source": source}]
    numbers = {each: _number(spec, row, each) for each in ("margin", "probability") if each in spec}
    return [{**pair, **numbers, **_split(spec, row)} for pair in pairs]


def _sides(spec: Spec, row: Row) -> tuple[Messages, str, str]:
    if "chosen" in spec:
        sides = _divided(spec, row, "chosen", "rejected", is_sound=False)
        _require_order(spec, row)
        return sides
    question, first, second = _divided(spec, row, "response_a", "response_b", is_sound=True)
    lead = _lead(spec, row)
    if abs(lead) <= _gap(spec, row):
        raise _tie(spec, row, _path(spec, "winner" if "winner" in spec else "score_b"), lead)
    return (question, first, second) if lead > 0 else (question, second, first)


def _lead(spec: Spec, row: Row) -> float:
    if "winner" not in spec:
        return _number(spec, row, "score_a") - _number(spec, row, "score_b")
    winner, first, second = (_name_of(spec[each].read(row)) for each in ("winner", "winner_a", "winner_b"))
    return {first: math.inf, second: -math.inf}.get(winner, 0.0)


def _require_order(spec: Spec, row: Row) -> None:
    if not {"score_chosen", "score_rejected"} <= spec.keys():
        return
    if all(spec[each].read(row) is None for each in ("score_chosen", "score_rejected")):
        return
    chosen, rejected = _number(spec, row, "score_chosen"), _number(spec, row, "score_rejected")
    path = _path(spec, "score_chosen")
    if chosen < rejected:
        reason = f"{chosen:g} is below {rejected:g} of the rejected answer: the sides are swapped"
        raise RowValueError(path, reason, chosen)
    if chosen - rejected <= _gap(spec, row):
        raise _tie(spec, row, path, chosen)


def _divided(spec: Spec, row: Row, first: str, second: str, *, is_sound: bool) -> tuple[Messages, str, str]:
    values = spec[first].read(row), spec[second].read(row)
    if "prompt" not in spec and all(isinstance(value, str) for value in values):
        before, *texts = divided(*values, _path(spec, first))
        return conversation(before, _path(spec, first)), texts[0], texts[1]
    (own, chosen), (other, rejected) = (
        answer_of(value, _path(spec, each)) for value, each in zip(values, (first, second), strict=True)
    )
    if own != other:
        error = LeftOutError if is_sound else RowError
        raise error(_path(spec, second), f"does not share its context with {first!r}", other)
    given = _asked(spec, row) if "prompt" in spec else own
    return question_of(continued(given, own), _path(spec, first)), chosen, rejected


def _ranking(spec: Spec, name: str, row: Row) -> list[dict[str, Any]]:
    path, answers = _path(spec, "prompt"), _path(spec, "responses")
    question = _with_system(spec, row, question_of(_asked(spec, row), path))
    texts = [
        answer_of(value, _item(answers, place))[1]
        for place, value in enumerate(_list(spec["responses"].read(row), answers))
    ]
    sign, name_of_numbers = (1.0, "ranks") if "ranks" in spec else (-1.0, "scores")
    numbers = _numbers(spec[name_of_numbers].read(row), _path(spec, name_of_numbers))
    ranks = [sign * number for number in numbers]
    found = _id(spec, row) or row_id(name, question)
    try:
        return expand(found, question, texts, ranks, source=_text(spec, row, "source") or name, gap=_gap(spec, row))
    except LeftOutError as error:
        raise _tie(spec, row, answers, texts[:1], error.reason) from error


def _asked(spec: Spec, row: Row) -> Messages:
    turns = conversation(spec["prompt"].read(row), _path(spec, "prompt"))
    return [*history(spec["history"].read(row), _path(spec, "history")), *turns] if "history" in spec else turns


def _answered(spec: Spec, name: str, row: Row) -> dict[str, str]:
    value = spec["reference"].read(row) if "reference" in spec else None
    reference = "" if value is None else reference_text(value, _path(spec, "reference"))
    if "|letters" in spec["prompt"].written:
        _require_choice(reference, spec["prompt"].read(row), _path(spec, "reference"))
    return {"reference": reference, "task": _text(spec, row, "task") or name}


def _require_choice(reference: str, question: str, path: str) -> None:
    letters = _CHOICE.findall(question)
    if len(reference) == 1 and reference.isupper() and reference not in letters:
        raise RowValueError(path, f"is the choice {reference}, and the question has {', '.join(letters)}", reference)


def _with_system(spec: Spec, row: Row, question: Messages) -> Messages:
    system = _text(spec, row, "system")
    if not system.strip() or (question and question[0]["role"] == "system"):
        return question
    return [{"role": "system", "content": system}, *question]


def _split(spec: Spec, row: Row) -> dict[str, str]:
    return split_of(spec["split"].read(row)) if "split" in spec else {}


def _id(spec: Spec, row: Row) -> str:
    return _text(spec, row, "id")


def _text(spec: Spec, row: Row, target: str) -> str:
    value = spec[target].read(row) if target in spec else None
    if value is None:
        return ""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, bool) or not isinstance(value, str | Number):
        raise RowError(_path(spec, target), f"must be a text or a number, not {kind_of(value)}", value)
    if isinstance(value, float):
        value = number_of(value, _path(spec, target))
    return value if isinstance(value, str) else number_text(value)


def _name_of(value: Any) -> str:
    try:
        return number_text(number_of(value, ""))
    except RowError:
        return str(value)


def _number(spec: Spec, row: Row, target: str) -> float:
    return number_of(spec[target].read(row), _path(spec, target))


def number_of(value: Any, path: str) -> float:
    """Return a finite number: itself, 1 or 0 of a boolean, or those of a text, because ``.csv`` has nothing else.

    Raises:
        RowError: it is none.
    """
    try:
        number = float(_BOOLEANS.get(value, value)) if isinstance(value, str | Number) else None
    except (ValueError, OverflowError):
        number = None
    if number is None:
        raise RowError(path, f"must be a number, not {kind_of(value)}", value)
    if not math.isfinite(number):
        raise RowError(path, "must be finite", value)
    return number


def _numbers(values: Any, path: str) -> list[float]:
    return [number_of(value, _item(path, place)) for place, value in enumerate(_list(values, path))]


def _item(path: str, place: int) -> str:
    """Return the path of an item of a list: ``answers.*.rank`` is ``answers.3.rank``."""
    return path.replace("*", str(place), 1) if "*" in path else f"{path}.{place}"


def _list(value: Any, path: str) -> list[Any]:
    if not isinstance(value, list):
        raise RowError(path, f"must be a list, not {kind_of(value)}", value)
    return value


def _gap(spec: Spec, row: Row) -> float:
    return _number(spec, row, "min_gap") if "min_gap" in spec else 0.0


def _tie(spec: Spec, row: Row, path: str, value: object, reason: str = "a tie is no pair") -> RowError:
    is_refused = "ties" in spec and spec["ties"].read(row) == "refuse"
    return (RowValueError if is_refused else LeftOutError)(path, reason.removeprefix(LEFT_OUT * is_refused), value)


def _path(spec: Spec, target: str) -> str:
    return (spec[target].columns or (target,))[0]
