"""What rows cost in tokens, and which rows a token budget or a control token refuses.

The tokenizer enters as functions, so that contracts know no tokenizer library.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pandas as pd

from data_contracts.contract import Contract, RowComplaint
from data_contracts.fields import Messages

_END = (-1,)  # stands for the tokens that end a turn: no token of a text


@dataclass(frozen=True, kw_only=True)
class TokenMeter:
    """How texts become tokens.

    ``encode``: token ids of a text in which nothing is a control token. ``prompt_length``: number of tokens of a
    conversation with its template and generation prompt. ``special_tokens``: the control tokens, as text.
    """

    encode: Callable[[str], Sequence[int]]
    prompt_length: Callable[[Messages], int]
    special_tokens: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Number of tokens per row (columns ``prompt_tokens`` and, for each answer, ``…_tokens``), and the refused rows."""

    lengths: pd.DataFrame
    complaints: tuple[RowComplaint, ...]


def measure(frame: pd.DataFrame, contract: Contract, meter: TokenMeter, *, max_tokens: int) -> Measured:
    """Count the tokens of every row of a frame that fulfils its contract, and hold them against the budget.

    A row with a control token in its text is refused without being encoded (a tokenizer may refuse such a text). A
    prompt must leave room for an answer; a demonstration must fit whole, as its end is an action to be learnt; a pair
    is cut to the budget by training, so it must still differ after that.
    """
    controls = re.compile("|".join(map(re.escape, filter(None, meter.special_tokens))) or r"(?!)")
    lengths: list[list[int]] = []
    found: list[RowComplaint] = []
    names = (*contract.answers, *({"reference"} & set(frame.columns)))
    for place, (messages, *texts) in enumerate(frame[["messages", *names]].itertuples(index=False)):
        complaint = _control_complaint(place, messages, dict(zip(names, texts, strict=True)), controls)
        answers = texts[: len(contract.answers)]
        counts = [0] * (1 + len(answers))
        if complaint is None:
            prompt, ids = meter.prompt_length(messages), [tuple(meter.encode(answer)) for answer in answers]
            counts = [prompt, *map(len, ids)]
            complaint = _budget_complaint(place, answers, [one + _END for one in ids], (prompt, max_tokens))
        lengths.append(counts)
        if complaint is not None:
            found.append(complaint)
    columns = ["prompt_tokens", *(f"{name}_tokens" for name in contract.answers)]
    return Measured(lengths=pd.DataFrame(lengths, columns=columns, dtype=int), complaints=tuple(found))


def _control_complaint(
    place: int, messages: Messages, texts: dict[str, str], controls: re.Pattern[str]
) -> RowComplaint | None:
    turns = {f"messages.{number}.content": turn["content"] for number, turn in enumerate(messages)}
    for field, text in {**turns, **texts}.items():
        match = controls.search(text)
        if match:
            around = text[max(0, match.start() - 60) : match.end() + 60]
            reason = f"holds the control token {match.group()} as text"
            return RowComplaint(row=place, field=field, value=around, reason=reason, is_fatal=True)
    return None


def _budget_complaint(
    place: int, answers: Sequence[str], ids: Sequence[tuple[int, ...]], budget: tuple[int, int]
) -> RowComplaint | None:
    prompt, max_tokens = budget
    room = max_tokens - prompt
    if room <= 0:
        reason = f"the prompt leaves no room for an answer in {max_tokens} tokens"
        return RowComplaint(row=place, field="messages", value=f"{prompt} tokens", reason=reason)
    if len(ids) == 1 and len(ids[0]) > room:
        reason = f"longer than {max_tokens} tokens with its prompt"
        return RowComplaint(row=place, field="completion", value=answers[0], reason=reason)
    if len(ids) == 2 and ids[0][:room] == ids[1][:room]:
        reason = f"chosen and rejected are the same after truncation to {max_tokens} tokens"
        return RowComplaint(row=place, field="rejected", value=answers[1], reason=reason)
    return None
