"""Lengths of rows in tokens, and rows that exceed the token budget or contain special tokens.

The tokenizer is given as functions of many texts, so that contracts need no tokenizer library. Texts are encoded only
if an upper bound without a tokenizer leaves it open whether they fit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlcore.data_contracts.adapters.fields import Messages
from rlcore.data_contracts.contracts.contract import Contract, RowViolation

UNKNOWN = -1
_END = (-1,)  # represents the tokens that end a turn, and is no token of a text
Rows = Sequence[dict[str, Any]]
Lengths = NDArray[np.int32]


@dataclass(frozen=True, kw_only=True)
class TokenMeter:
    """Functions of a tokenizer that the gate needs.

    ``encode``: token ids of each text without special tokens. ``prompt_lengths``: number of tokens of each conversation
    with its template and generation prompt. ``max_text_tokens`` and ``max_prompt_tokens``: cheap upper bounds of these
    numbers. ``special_tokens``: as text.
    """

    encode: Callable[[Sequence[str]], Sequence[Sequence[int]]]
    prompt_lengths: Callable[[Sequence[Messages]], Sequence[int]]
    max_text_tokens: Callable[[str], int]
    max_prompt_tokens: Callable[[Sequence[Messages]], Sequence[int]]
    special_tokens: Sequence[str]


def measure(
    rows: Rows, contract: Contract, meter: TokenMeter, *, max_tokens: int
) -> tuple[Lengths, list[RowViolation]]:
    """Return the numbers of tokens of each valid row's prompt and answers, and the rows that break the token budget.

    Lengths are int32 [rows, 1 + answers], -1 if not needed. A row with a special token in its text is rejected without
    encoding (a tokenizer may reject such a text). A prompt must leave room for an answer. A demonstration must fit
    completely, because its end is trained too. Training truncates a pair to the budget, after which its sides must
    still differ.
    """
    found = controls_in(rows, contract, meter.special_tokens)
    refused = {one.row for one in found}
    left = [place for place in range(len(rows)) if place not in refused]
    bounds = _of_each(meter.max_prompt_tokens, [rows[place]["messages"] for place in left])
    lengths = np.full((len(rows), 1 + len(contract.answers)), UNKNOWN, dtype=np.int32)
    open_ = [
        place
        for place, bound in zip(left, bounds, strict=True)
        if bound + max((meter.max_text_tokens(rows[place][name]) for name in contract.answers), default=0) >= max_tokens
    ]
    prompts, ids = _encoded(rows, open_, contract, meter)
    for number, place in enumerate(open_):
        sides = [answers[number] for answers in ids]
        lengths[place] = [prompts[number], *map(len, sides)]
        complaint = _budget_complaint(
            place, [rows[place][name] for name in contract.answers], sides, (prompts[number], max_tokens)
        )
        found += [complaint] if complaint else []
    return lengths, sorted(found, key=lambda one: one.row)


def completed_lengths(rows: Rows, lengths: Lengths, contract: Contract, meter: TokenMeter) -> Lengths:
    """Return the lengths of accepted rows after computing the missing ones."""
    missing = np.flatnonzero(lengths[:, 0] == UNKNOWN).tolist()
    prompts, ids = _encoded(rows, missing, contract, meter)
    counted = lengths.copy()
    for column, values in enumerate([prompts, *([len(one) for one in side] for side in ids)]):
        counted[missing, column] = values
    return counted


def _encoded(
    rows: Rows, places: Sequence[int], contract: Contract, meter: TokenMeter
) -> tuple[Sequence[int], list[Sequence[Sequence[int]]]]:
    if not places:
        return [], [[] for _ in contract.answers]
    prompts = _of_each(meter.prompt_lengths, [rows[place]["messages"] for place in places])
    return prompts, [meter.encode([rows[place][name] for place in places]) for name in contract.answers]


def _of_each(lengths: Callable[[Sequence[Messages]], Sequence[int]], conversations: Sequence[Messages]) -> list[int]:
    numbers: dict[tuple[str, ...], int] = {}
    different: list[Messages] = []
    at: list[int] = []
    for turns in conversations:
        texts = tuple([text for turn in turns for text in (turn["role"], turn["content"])])
        at.append(numbers.setdefault(texts, len(different)))
        if at[-1] == len(different):
            different.append(turns)
    found = lengths(different)
    return [found[number] for number in at]


def controls_in(rows: Rows, contract: Contract, special_tokens: Sequence[str]) -> list[RowViolation]:
    """Return the rows with a special token in a message, an answer or the reference."""
    named = [token for token in special_tokens if token]
    if not named:
        return []
    controls = re.compile("|".join(map(re.escape, named)))
    names = [name for name in (*contract.answers, "reference") if name in contract.columns]
    found: list[RowViolation] = []
    for place, row in enumerate(rows):
        fields = {f"messages.{number}.content": turn["content"] for number, turn in enumerate(row["messages"])}
        fields |= {name: row[name] for name in names}
        hit = next(((field, match) for field, text in fields.items() if (match := controls.search(text))), None)
        if hit:
            field, match = hit
            around = fields[field][max(0, match.start() - 60) : match.end() + 60]
            reason = f"contains the special token {match.group()} as text"
            found.append(RowViolation(row=place, field=field, value=around, reason=reason, is_fatal=True))
    return found


def _budget_complaint(
    place: int, answers: Sequence[str], sides: Sequence[Sequence[int]], budget: tuple[int, int]
) -> RowViolation | None:
    prompt, max_tokens = budget
    room = max_tokens - prompt
    ids = [(*side, *_END) for side in sides]
    if room <= 0:
        reason = f"the prompt leaves no room for an answer in {max_tokens} tokens"
        return RowViolation(row=place, field="messages", value=f"{prompt} tokens", reason=reason)
    if len(ids) == 1 and len(ids[0]) > room:
        reason = f"longer than {max_tokens} tokens with its prompt"
        return RowViolation(row=place, field="completion", value=answers[0], reason=reason)
    if len(ids) == 2 and ids[0][:room] == ids[1][:room]:
        reason = f"chosen and rejected are the same after truncation to {max_tokens} tokens"
        return RowViolation(row=place, field="rejected", value=answers[1], reason=reason)
    return None
