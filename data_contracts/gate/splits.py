"""Split of each prompt by its hash, never by row, so that no prompt is both trained on and evaluated on.

A tenth of the prompts is held out; the requested numbers cut each side, and move no row to the other. Generators hold
out a fixed tenth of all problems, for all seeds and kinds of rows, so that separately made datasets cannot leak into
one another. Files hold out the tenth of their prompts with the smallest hashes. Spellings of one question are one
prompt, represented by the smallest hash.
"""

from __future__ import annotations

import numpy as np

from rlcore.data_contracts.errors import ContractError
from rlcore.data_contracts.gate.ledger import EVAL, TRAIN, Column, Mask, Numbers, Rows

HELD_OUT_TENTH = 16**8 // 10
_TENTH = 10


def is_held_out(digest: str) -> bool:
    """Return True if a generator keeps the prompt of this hash for evaluation: one in ten."""
    return int(digest[:8], 16) < HELD_OUT_TENTH


def representatives(keys: Numbers, spellings: Numbers) -> Rows:
    """Return for each row the row of the same key whose spelling has the smallest hash."""
    order = np.lexsort((spellings, keys))
    is_start = np.ones(len(keys), dtype=bool)
    is_start[1:] = keys[order[1:]] != keys[order[:-1]]
    found = np.empty(len(keys), dtype=np.int64)
    found[order] = order[np.flatnonzero(is_start)][np.cumsum(is_start) - 1]
    return found


def held_out_prompts(hashes: Column, *, first: Mask) -> Mask:
    """Return the rows of a file whose prompts are held out, a tenth of them, given the prompt hash of each row.

    All prompts of the rows in ``first`` (evaluation prompts of another dataset) are held out before any other.
    """
    prompts = np.unique(hashes)
    wanted = max(1, round(len(prompts) / _TENTH))
    reserved = np.unique(hashes[first])
    others = np.setdiff1d(prompts, reserved, assume_unique=True)
    held_out = np.concatenate([reserved, others[: max(0, wanted - len(reserved))]])
    return np.isin(hashes, held_out)


def assign(given: Column, is_held_out: Mask, *, where: str) -> Column:
    """Return a split for every row: the source's own if all rows have one, else by the prompt's hash.

    Raises:
        ContractError: some rows have a split and others have none.
    """
    missing = int((given == 0).sum())
    if missing == len(given):
        return np.where(is_held_out, EVAL, TRAIN).astype(np.int8)
    if missing:
        raise ContractError(
            f"{missing} of {len(given)} rows have no 'split', the others have one",
            where=where,
            fix="give every row a split, or none and let prompts be divided by their hash",
        )
    return given


def select(split: Column, prompts: Column, order: Numbers, *, num_train: int, num_eval: int) -> Mask:
    """Select at most ``num_train`` and ``num_eval`` of the rows.

    One row of each prompt comes before a second row of any: held-out rows are then as independent as the data allow.
    ``order``: priority of each row's prompt; that of training rows depends on the seed.
    """
    kept = np.zeros(len(split), dtype=bool)
    turn = _turns(prompts)
    for side, limit in ((TRAIN, num_train), (EVAL, num_eval)):
        rows = np.flatnonzero(split == side)
        if len(rows) > limit:
            rows = rows[np.lexsort((order[rows], turn[rows]))[:limit]]
        kept[rows] = True
    return kept


def _turns(prompts: Column) -> Rows:
    order = np.argsort(prompts, kind="stable")
    is_start = np.ones(len(order), dtype=bool)
    is_start[1:] = prompts[order[1:]] != prompts[order[:-1]]
    starts = np.flatnonzero(is_start)
    turns = np.empty(len(order), dtype=np.int64)
    turns[order] = np.arange(len(order)) - starts[np.cumsum(is_start) - 1]
    return turns
