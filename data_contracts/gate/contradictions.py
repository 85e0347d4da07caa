"""Contradictions: rows that state the opposite of another row. All of them are rejected, as either may be wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rlcore.data_contracts.contracts import preference_pairs, prompts
from rlcore.data_contracts.contracts.contract import Contract
from rlcore.data_contracts.gate.ledger import NO_ROWS, Column, Ledger, Mask, Numbers, Rows, is_repeated
from rlcore.data_contracts.gate.row_summary import RowSummary


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
    if contract is prompts.CONTRACT:
        return [_two_references(ledger, np.flatnonzero(is_sound))]
    if contract is not preference_pairs.CONTRACT:
        return []
    found = _cycles(ledger, np.flatnonzero(is_sound))
    left = is_sound.copy()
    for one in found:
        left[one.rows] = False
    return [*found, _mixed_sets(ledger, np.flatnonzero(left))]


def _two_references(ledger: Ledger, sound: Rows) -> Flagged:
    """Return rows whose prompt has another reference in another row."""
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
    """Combine two numbers, such as an answer and a prompt, into one."""
    mixed = (keys ^ (keys >> np.uint64(31))) * np.uint64(0x9E3779B97F4A7C15) + others
    return (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)


def _names(row: RowSummary, other: RowSummary) -> str:
    return f"{row.name} against {other.name}"


def _table(rows: list[tuple[int, int]]) -> Rows:
    return np.array(rows, dtype=np.int64).reshape(-1, 2)
