"""Decisions by comparing rows: splits, contradictions, near duplicates of evaluation prompts, selection."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rlcore.data_contracts.adapters.fields import Messages
from rlcore.data_contracts.contracts.contract import Contract
from rlcore.data_contracts.contracts.datasets import PREFERENCE_PAIRS, PROMPTS
from rlcore.data_contracts.gate.eval_leakage import (
    IN_HISTORY,
    NEAR,
    Evaluated,
    LeakedRows,
    Overlap,
    SharedWords,
    find_leaks,
    texts_of,
)
from rlcore.data_contracts.gate.ledger import EVAL, NO_ROWS, TRAIN, Column, Ledger, Mask, Numbers, Rows, is_repeated
from rlcore.data_contracts.gate.records import Origin
from rlcore.data_contracts.gate.row_hashes import look_up
from rlcore.data_contracts.gate.rules import DatasetState
from rlcore.data_contracts.gate.splits import assign, held_out_prompts, representatives, select
from rlcore.data_contracts.gate.stream import RowStream
from rlcore.data_contracts.text import question_messages, question_text

_SHOWN = 120  # characters of a text in a report


@dataclass(frozen=True, kw_only=True)
class ResolvedRows:
    """Resolved rows. ``state``: sides, accepted and kept rows. ``flagged``: rows rejected by a comparison.

    ``num_apart``: training rows that a comparison with evaluation prompts held out, or rejected if the source divides
    its rows. ``crowded``: evaluation prompts that resemble too many others: a template, not a leak. ``num_shared``:
    training rows rejected for an n-gram shared with an evaluation prompt.
    """

    state: DatasetState
    flagged: Sequence[Flagged]
    num_apart: int
    crowded: int
    num_shared: int = 0


def resolve_rows(
    stream: RowStream,
    ledger: Ledger,
    contract: Contract,
    evaluated: Evaluated,
    *,
    num_train: int,
    num_eval: int,
    keeps_apart: bool,
) -> ResolvedRows:
    """Divide, compare and select rows.

    Raises:
        ContractError: some rows have a split and others have none.
    """
    prompts = representatives(ledger.key, ledger.spelling)
    split = _divided(stream, ledger, prompts, evaluated)
    flagged = contradictions(ledger, ledger.is_sound, contract)
    is_accepted = _without(ledger.is_sound, flagged)
    close = LeakedRows.none()
    if keeps_apart:
        close = _close(stream, ledger, split, is_accepted, evaluated)
        if ledger.split.any():
            flagged = [*flagged, *_as_flagged(close)]
            is_accepted = _without(is_accepted, flagged)
        else:
            split[close.rows] = EVAL
    state = DatasetState(
        ledger=ledger,
        contract=contract,
        split=split,
        prompts=prompts,
        is_accepted=is_accepted,
        is_kept=is_accepted,
        evaluated=evaluated.keys,
        num_train=num_train,
        num_eval=num_eval,
    )
    return ResolvedRows(state=chosen(state), flagged=flagged, num_apart=len(close.rows), crowded=close.crowded)


def chosen(state: DatasetState) -> DatasetState:
    """Return the rows with the requested number of accepted rows kept."""
    rows = np.flatnonzero(state.is_accepted)
    split, prompts = state.split[rows], state.prompts[rows]
    order = np.where(split == TRAIN, state.ledger.order[prompts], state.ledger.spelling[prompts])
    is_kept = np.zeros(len(state.ledger), dtype=bool)
    is_kept[rows] = select(split, prompts, order, num_train=state.num_train, num_eval=state.num_eval)
    return replace(state, is_kept=is_kept)


def drop_overlaps(stream: RowStream, resolved: ResolvedRows, evaluated: Evaluated, shared: SharedWords) -> ResolvedRows:
    """Return the rows without training rows that share an n-gram with an evaluation prompt, here or elsewhere.

    The training rows are read once more; held-out rows are unchanged.
    """
    state = resolved.state
    places, messages = [-1 - place for place in range(len(evaluated.messages))], list(evaluated.messages)
    for found in look_up(stream, state.ledger, np.flatnonzero(state.is_accepted & (state.split == EVAL))):
        places += found.places.tolist()
        messages += [row["messages"] for row in found.rows]
    overlap, hits = Overlap(messages, size=shared.size), dict[int, int]()
    train = np.flatnonzero(state.is_accepted & (state.split == TRAIN))
    for found in look_up(stream, state.ledger, train):
        seen = overlap.see([texts_of(row, state.contract) for row in found.rows])
        hits |= {int(found.places[row]): places[owner] for row, owner in seen.items()}
    rows = np.array(sorted(hits), dtype=np.int64)
    others = np.array([hits[row] for row in rows.tolist()], dtype=np.int64)
    flagged = Flagged(rows=rows, others=others, field="messages", reason=shared.reason, describe_match=_two_prompts)
    state = chosen(replace(state, is_accepted=_without(state.is_accepted, [flagged])))
    return replace(resolved, state=state, flagged=[*resolved.flagged, flagged], num_shared=len(rows))


def _divided(stream: RowStream, ledger: Ledger, prompts: Rows, evaluated: Evaluated) -> Column:
    is_held_out = held_out_prompts(ledger.spelling[prompts], first=np.isin(ledger.key, evaluated.keys))
    return assign(ledger.split, is_held_out, where=stream.source.name)


def _close(stream: RowStream, ledger: Ledger, split: Column, is_accepted: Mask, evaluated: Evaluated) -> LeakedRows:
    def tokens(rows: Rows) -> Mapping[int, Sequence[str]]:
        return {
            place: _words(row["messages"])
            for found in look_up(stream, ledger, rows)
            for place, row in zip(found.places.tolist(), found.rows, strict=True)
        }

    return find_leaks(ledger, is_accepted & (split == TRAIN), is_accepted & (split == EVAL), evaluated, tokens=tokens)


def _words(messages: Messages) -> list[str]:
    """Return the words and signs of a question; equal ones are one object, because many rows are held in memory."""
    return [sys.intern(word) for turn in question_messages(messages) for word in question_text(turn["content"]).split()]


def _as_flagged(close: LeakedRows) -> list[Flagged]:
    return [
        Flagged(
            rows=close.rows[mask],
            others=close.others[mask],
            field="messages",
            reason=reason,
            describe_match=_two_prompts,
        )
        for mask, reason in ((close.in_history, IN_HISTORY), (~close.in_history, NEAR))
    ]


def _two_prompts(row: RowSummary, other: RowSummary) -> str:
    return f"{row.prompt[:80]!r} and {other.prompt[:80]!r} in {other.place}"


def _without(mask: Mask, flagged: Sequence[Flagged]) -> Mask:
    left = mask.copy()
    for one in flagged:
        left[one.rows] = False
    return left


@dataclass(frozen=True, kw_only=True)
class Flagged:
    """Rejected rows, ascending, each with a contradicting row of the ledger, or ``-1 - place`` in other datasets.

    Negative numbers are prompts that other datasets evaluate on. ``describe_match`` describes the contradiction.
    """

    rows: Rows
    others: Rows
    field: str
    reason: str
    describe_match: Callable[[RowSummary, RowSummary], str]


def contradictions(ledger: Ledger, is_sound: Mask, contract: Contract) -> list[Flagged]:
    """Return the contradicting rows of a contract; different tests of code do not contradict."""
    if contract is PROMPTS:
        return [_two_references(ledger, np.flatnonzero(is_sound))]
    if contract is not PREFERENCE_PAIRS:
        return []
    found = _cycles(ledger, np.flatnonzero(is_sound))
    left = is_sound.copy()
    for one in found:
        left[one.rows] = False
    return [*found, _mixed_sets(ledger, np.flatnonzero(left))]


def _two_references(ledger: Ledger, sound: Rows) -> Flagged:
    rows, others = _against(sound, ledger.key[sound], ledger.reference[sound])
    return Flagged(
        rows=rows,
        others=others,
        field="reference",
        reason="another row has the same prompt and another reference",
        describe_match=lambda row, other: f"{row.name}: {row.reference!r}, {other.name}: {other.reference!r}",
    )


def _mixed_sets(ledger: Ledger, sound: Rows) -> Flagged:
    """Return pairs of a set whose pairs differ in prompt or weight, although a set has one."""
    content = _mixed(ledger.key[sound], ledger.weight[sound].view(np.uint64))
    rows, others = _against(sound, ledger.set_name[sound], content)
    return Flagged(
        rows=rows,
        others=others,
        field="set_id",
        reason="another pair of this set has another prompt or weight",
        describe_match=lambda row, other: f"{row.set_name} in {row.name} and {other.name}",
    )


def _against(rows: Rows, groups: Column, contents: Column) -> tuple[Rows, Rows]:
    """Return rows with other content than a row of the same group, and one such row for each."""
    together = is_repeated(groups)
    if not together.any():
        return NO_ROWS, NO_ROWS
    rows, groups, contents = rows[together], groups[together], contents[together]
    order = np.lexsort((rows, contents, groups))
    rows, groups, contents = rows[order], groups[order], contents[order]
    is_start = np.append(True, groups[1:] != groups[:-1])
    group, starts = np.cumsum(is_start) - 1, np.flatnonzero(is_start)
    first, last = starts[group], (np.append(starts[1:], len(rows)) - 1)[group]
    # A row with its group's first content is matched with one with the last, others with the first.
    others = np.where(contents == contents[first], rows[last], rows[first])
    is_mixed = contents[first] != contents[last]
    found, others = rows[is_mixed], others[is_mixed]
    back = np.argsort(found)
    return found[back], others[back]


def _cycles(ledger: Ledger, sound: Rows) -> list[Flagged]:
    """Return pairs in a preference cycle: A over B over A, or A over B over C over A."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    sides = [_mixed(ledger.key[sound], ledger.answers[sound, side]) for side in (0, 1)]
    _, nodes = np.unique(np.concatenate(sides), return_inverse=True)
    chosen, rejected = nodes[: len(sound)], nodes[len(sound) :]
    size = int(nodes.max(initial=-1)) + 1
    graph = coo_array((np.ones(len(sound), dtype=np.int8), (chosen, rejected)), shape=(size, size)).tocsr()
    component = connected_components(graph, connection="strong")[1] if size else nodes
    inside = np.flatnonzero(component[chosen] == component[rejected])
    edges = {(int(chosen[one]), int(rejected[one])): int(sound[one]) for one in inside[::-1]}
    leaving = {better: row for (better, _), row in edges.items()}
    mirrored: list[tuple[int, int]] = []
    longer: list[tuple[int, int]] = []
    for one in inside.tolist():
        better, worse = int(chosen[one]), int(rejected[one])
        mirror = edges.get((worse, better))
        (longer if mirror is None else mirrored).append((int(sound[one]), leaving[worse] if mirror is None else mirror))
    reasons = ("another pair prefers the same answers the other way", "the pairs of its prompt prefer in a circle")
    return [
        Flagged(rows=rows[:, 0], others=rows[:, 1], field="pair_id", reason=reason, describe_match=_names)
        for reason, rows in ((reasons[0], _table(mirrored)), (reasons[1], _table(longer)))
    ]


def _mixed(keys: Numbers, others: Numbers) -> Numbers:
    mixed = (keys ^ (keys >> np.uint64(31))) * np.uint64(0x9E3779B97F4A7C15) + others
    return (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)


def _names(row: RowSummary, other: RowSummary) -> str:
    return f"{row.name} against {other.name}"


def _table(rows: list[tuple[int, int]]) -> Rows:
    return np.array(rows, dtype=np.int64).reshape(-1, 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowSummary:
    """Row, or a prompt of another dataset, which has no ``origin``."""

    origin: Origin | None
    name: str
    prompt: str
    reference: str = ""
    set_name: str = ""

    @property
    def place(self) -> str:
        """Location in the source: ``line 7``."""
        if self.origin is None:
            return "another dataset"
        return f"{self.origin.source}, line {self.origin.line}" if self.origin.source else f"line {self.origin.line}"


RowSummaries = Mapping[int, RowSummary]


def summarize_row(row: Mapping[str, Any], origin: Origin, contract: Contract) -> RowSummary:
    """Summarize a row in contract columns."""
    return RowSummary(
        origin=origin,
        name=row[contract.id_column][:_SHOWN],
        prompt=_start_of(row["messages"]),
        reference=str(row.get("reference", ""))[:_SHOWN],
        set_name=str(row.get("set_id", ""))[:_SHOWN],
    )


def summarize_foreign(messages: Messages) -> RowSummary:
    """Summarize an evaluation prompt of another dataset."""
    return RowSummary(origin=None, name="", prompt=_start_of(messages))


def _start_of(messages: Messages) -> str:
    return messages[-1]["content"][:_SHOWN]
