"""Statistics of kept rows, computed while they are written to the snapshot."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
import pandas as pd

from rlcore.data_contracts.drift.sketches import GROUP, Sketch, sketch
from rlcore.data_contracts.errors import ContractError
from rlcore.data_contracts.gate.ledger import EVAL, SPLITS, TRAIN, Mask, Rows
from rlcore.data_contracts.gate.lookup import Found
from rlcore.data_contracts.gate.overlap import Overlap, texts_of
from rlcore.data_contracts.gate.records import canonical_row
from rlcore.data_contracts.gate.report import RuleResult
from rlcore.data_contracts.gate.rules import DatasetState
from rlcore.data_contracts.gate.token_budget import TokenMeter, completed_lengths

MAX_SKETCHED = 8_192  # rows of whole prompts: chance moves PSI and KS by less than 0.05, and 0.1 warns


class KeptRows:
    """Collector of kept rows in order, with their sides: digest, sketches and overlap."""

    def __init__(self, state: DatasetState, overlap: Overlap, *, meter: TokenMeter, group_column: str = "") -> None:
        self._state, self._overlap, self._meter, self._group_column = state, overlap, meter, group_column
        self._written = [*state.contract.columns, *state.contract.carried]
        self._digest, self._train_digest = hashlib.sha256(), hashlib.sha256()
        self._is_sketched = sketched_rows(state)
        self._sketched: list[pd.DataFrame] = []

    def take(self, found: Found) -> pd.DataFrame:
        """Add the next rows as a frame in contract columns, and those that travel with them."""
        state = self._state
        sides = state.split[found.places].tolist()
        none = dict.fromkeys(state.contract.carried, "")
        rows = [{**none, **row, "split": SPLITS[side]} for row, side in zip(found.rows, sides, strict=True)]
        lines = [self._spelled(row) + b"\n" for row in rows]
        self._digest.update(b"".join(lines))
        pairs = zip(lines, sides, strict=True)
        self._train_digest.update(b"".join([line for line, side in pairs if side == TRAIN]))
        train = (row for row, side in zip(rows, sides, strict=True) if side == TRAIN)
        self._overlap.see([texts_of(row, state.contract) for row in train])
        frame = pd.DataFrame({name: [row[name] for row in rows] for name in self._written})
        self._note(rows, frame, found.places)
        return frame

    def _spelled(self, row: dict[str, Any]) -> bytes:
        has_others = len(row) > len(self._written)
        return canonical_row({name: row[name] for name in self._written} if has_others else row)

    @property
    def digest(self) -> str:
        """Return the SHA-256 over the canonical JSON lines of the rows, independent of the file format."""
        return self._digest.hexdigest()

    @property
    def train_digest(self) -> str:
        """Return :attr:`digest` of the training rows alone."""
        return self._train_digest.hexdigest()

    def sketches(self) -> dict[str, Sketch]:
        """Return sketches of the columns; see :func:`rlcore.data_contracts.drift.sketches.sketch`."""
        return sketch(pd.concat(self._sketched, ignore_index=True)) if self._sketched else {}

    def overlap(self) -> RuleResult:
        """Return the fraction of evaluation prompts that share an n-gram with a training row."""
        touched, prompts, size = self._overlap.num_touched, self._overlap.num_prompts, self._overlap.size
        return RuleResult(
            name=f"eval_shares_no_{size}_words",
            severity="warning",
            value=touched / max(1, prompts),
            ok=not touched,
            detail=f"{touched} of {prompts} evaluation prompts share {size} words with training" if touched else "",
        )

    def _note(self, rows: list[dict[str, Any]], frame: pd.DataFrame, places: Rows) -> None:
        """Collect the rows for sketches, with their numbers of tokens instead of their answers."""
        chosen = np.flatnonzero(self._is_sketched[places])
        if not len(chosen):
            return
        state, own = self._state, [rows[place] for place in chosen.tolist()]
        known, answers = state.ledger.lengths[places[chosen]], state.contract.answers
        lengths = completed_lengths(own, known, state.contract, self._meter)
        sketched = frame.drop(columns=[*answers, *state.contract.carried]).iloc[chosen]
        names = ["prompt_tokens", *(f"{name}_tokens" for name in answers)]
        sketched[names] = lengths.astype(int)
        sketched["prompt_hash"] = state.prompts[places[chosen]]
        if self._group_column:
            sketched[GROUP] = [_group(row, self._group_column) for row in own]
        self._sketched.append(sketched)


def _group(row: dict[str, Any], column: str) -> str:
    """Return the document of a row, which a column of the contract or of the source names."""
    value = row[column] if column in row else json.loads(row.get("columns") or "{}").get(column)
    if value is None:
        raise ContractError(
            f"group_column = {column!r}: a row has no such value",
            fix=f"name a column that every row has: {', '.join(sorted(row))}, or one of the source of prompts",
        )
    return str(value)


def sketched_rows(state: DatasetState) -> Mask:
    """Return all kept rows, or those of a bounded number of prompts, selected by hash."""
    rows = np.flatnonzero(state.is_kept)
    if len(rows) > MAX_SKETCHED:
        order = state.ledger.order[state.prompts[rows]]
        values, sizes = np.unique(order, return_counts=True)
        last = max(1, int(np.searchsorted(np.cumsum(sizes), MAX_SKETCHED, side="right")))
        rows = rows[order <= values[last - 1]]
    mask = np.zeros(len(state.ledger), dtype=bool)
    mask[rows] = True
    return mask


def kept_evaluations(state: DatasetState) -> Rows:
    """Return the kept evaluation rows."""
    return np.flatnonzero(state.is_kept & (state.split == EVAL))
