"""What rows cost in tokens, and the row rules that follow from a token budget and from control tokens.

The tokenizer enters as functions, so that contracts know no tokenizer library.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pandas as pd

from data_contracts.contract import Contract
from data_contracts.fields import Messages

_END = (-1,)  # stands for the tokens that end a turn: no token of a text


@dataclass(frozen=True, kw_only=True)
class TokenMeter:
    """``encode``: token ids of a text in which nothing is a control token. ``prompt_length``: number of tokens of a
    conversation with its template and generation prompt. ``special_tokens``: the control tokens, as text.
    """

    encode: Callable[[str], Sequence[int]]
    prompt_length: Callable[[Messages], int]
    special_tokens: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class RowRule:
    """A rule of rows that needs more than the row: ``broken`` maps a frame to True where a row breaks it.

    ``is_fatal``: one such row refuses the dataset, whatever its rate.
    """

    field: str
    reason: str
    broken: Callable[[pd.DataFrame], pd.Series]
    is_fatal: bool = False


def row_rules(contract: Contract, meter: TokenMeter, *, max_tokens: int) -> tuple[RowRule, ...]:
    """Control tokens first (a tokenizer may refuse such text), then the budget of one row, prompt and answer together."""
    fields = ("messages", *contract.answers)
    controls = [
        RowRule(
            field=field,
            reason="holds a control token as text",
            broken=lambda frame, field=field: _holds_any(frame[field], meter.special_tokens),
            is_fatal=True,
        )
        for field in fields
    ]
    return (*controls, *_budget_rules(contract, meter, max_tokens))


def token_lengths(frame: pd.DataFrame, contract: Contract, meter: TokenMeter) -> dict[str, list[int]]:
    """Number of tokens per row of the prompt and of each answer (without the tokens that end it), for the sketches."""
    lengths = {"prompt_tokens": [meter.prompt_length(messages) for messages in frame["messages"]]}
    for name in contract.answers:
        lengths[f"{name}_tokens"] = [len(meter.encode(text)) for text in frame[name]]
    return lengths


def _budget_rules(contract: Contract, meter: TokenMeter, max_tokens: int) -> tuple[RowRule, ...]:
    def room(messages: Messages) -> int:
        return max_tokens - meter.prompt_length(messages)

    def prompt_fills_budget(frame: pd.DataFrame) -> pd.Series:
        return frame["messages"].map(room) <= 0

    def answer_is_cut(frame: pd.DataFrame) -> pd.Series:
        used = frame["completion"].map(lambda text: len((*meter.encode(text), *_END)))
        return used > frame["messages"].map(room)

    def sides_are_cut_equal(frame: pd.DataFrame) -> pd.Series:
        cut = [
            (*meter.encode(chosen), *_END)[:left] == (*meter.encode(rejected), *_END)[:left]
            for left, chosen, rejected in zip(
                frame["messages"].map(room), frame["chosen"], frame["rejected"], strict=True
            )
        ]
        return pd.Series(cut, index=frame.index, dtype=bool)

    rules = [
        RowRule(
            field="messages",
            reason=f"the prompt leaves no room for an answer in {max_tokens} tokens",
            broken=prompt_fills_budget,
        )
    ]
    if "completion" in contract.answers:
        rules.append(
            RowRule(field="completion", reason=f"longer than {max_tokens} tokens with its prompt", broken=answer_is_cut)
        )
    if "rejected" in contract.answers:
        rules.append(
            RowRule(
                field="rejected",
                reason=f"chosen and rejected are the same after truncation to {max_tokens} tokens",
                broken=sides_are_cut_equal,
            )
        )
    return tuple(rules)


def _holds_any(column: pd.Series, tokens: Sequence[str]) -> pd.Series:
    pattern = re.compile("|".join(map(re.escape, filter(None, tokens))) or r"(?!)")

    def holds(value: object) -> bool:
        texts = [value] if isinstance(value, str) else [turn["content"] for turn in value]  # type: ignore[attr-defined]  # messages
        return any(pattern.search(text) for text in texts)

    return column.map(holds).astype(bool)
