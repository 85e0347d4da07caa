"""Ledger: numbers of fixed size for each row, so that ten million rows fit into memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.uint64]
Rows = NDArray[np.int64]
Mask = NDArray[np.bool_]

SPLITS = ("", "train", "eval")  # row numbers of the ledger
TRAIN, EVAL = 1, 2
NO_ROWS: Rows = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """One entry per row, in the order of the source; equal rows were merged before. Texts are 64-bit hashes.

    ``line`` and ``part``: the row is the ``part``-th that the line with this index makes. ``reason``: 0 if all row
    rules hold. ``split``: that of the source, 0 for none. ``name``: the id. ``spelling``, ``order``: hashes that divide
    prompts, and that the seed selects them by. ``key``: equal for prompts with the same question. ``question``: hash by
    which a question is found in the history of others, 0 if it is too short. ``reference``, ``answers``: of their
    visible form. ``set_name``, ``weight``, ``longer`` (1 if the chosen side has more characters): of pairs.
    ``lengths``: numbers of tokens, if known. ``bands``: see
    :func:`rlcore.data_contracts.gate.near_duplicates.bands_of`.

    ``turn_row``, ``turn_key``: of conversations with several turns, the keys of each turn by itself, and of each
    beginning that ends with a user's turn.
    """

    line: Rows
    part: NDArray[np.int32]
    reason: NDArray[np.int32]
    split: NDArray[np.int8]
    name: Numbers
    spelling: Numbers
    order: Numbers
    key: Numbers
    question: Numbers
    reference: Numbers
    answers: Numbers
    set_name: Numbers
    weight: NDArray[np.float64]
    longer: NDArray[np.int8]
    lengths: NDArray[np.int32]
    bands: NDArray[np.uint32]
    turn_row: Rows
    turn_key: Numbers

    def __len__(self) -> int:
        return len(self.line)

    @property
    def is_sound(self) -> Mask:
        """Mask of the rows that pass all row rules."""
        return np.equal(self.reason, 0)


Column = NDArray[Any]
TURNS = ("turn_row", "turn_key")
COLUMNS = tuple(one.name for one in fields(Ledger) if one.name not in TURNS)


class LedgerBuilder:
    """Builder that collects entries batch by batch, and merges equal rows at the end."""

    def __init__(self) -> None:
        self._parts: dict[str, list[Column]] = {name: [] for name in (*COLUMNS, *TURNS)}
        self._digests: list[Numbers] = []
        self._size = 0

    def add(self, columns: Mapping[str, Column], digests: Numbers) -> None:
        """Add a batch's entries, turns by row of the batch, and 128 bits of each row's content: uint64 [rows, 2]."""
        for name, values in columns.items():
            self._parts[name].append(values + self._size if name == "turn_row" else values)
        self._digests.append(digests)
        self._size += len(digests)

    def finish(self) -> tuple[Ledger, Mask]:
        """Return the entries of unique rows, and a mask of all rows: True for the first of their kind.

        Columns are joined one at a time and their parts released, so that memory holds the entries once.
        """
        is_first = _is_first(_joined(self._digests))
        places, turn_row, turn_key = np.cumsum(is_first) - 1, *(_joined(self._parts[name]) for name in TURNS)
        is_kept = is_first[turn_row]
        columns: dict[str, Column] = {"turn_row": places[turn_row[is_kept]], "turn_key": turn_key[is_kept]}
        for name in COLUMNS:
            column = _joined(self._parts[name])
            columns[name] = column if is_first.all() else column[is_first]
        return Ledger(**columns), is_first


def _joined(parts: list[Column]) -> Column:
    whole = np.concatenate(parts)
    parts.clear()
    return whole


def _is_first(digests: Numbers) -> Mask:
    order = np.lexsort((digests[:, 1], digests[:, 0]))  # stable: the first of equal ones stays first
    is_first = np.ones(len(digests), dtype=bool)
    is_first[order[1:]] = (digests[order[1:]] != digests[order[:-1]]).any(axis=1)
    return is_first


def is_repeated(values: Column) -> Mask:
    """Return a mask of the rows whose value another row has."""
    order = np.argsort(values, kind="stable")
    is_same = values[order[1:]] == values[order[:-1]]
    repeated = np.zeros(len(values), dtype=bool)
    repeated[order[1:][is_same]] = True
    repeated[order[:-1][is_same]] = True
    return repeated
