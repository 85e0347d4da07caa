"""Targets of a mapping of columns, per kind of dataset, and their check before any row is read."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Literal

from rlcore.data_contracts.adapters.expressions import Expression, Scalar, parse

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
