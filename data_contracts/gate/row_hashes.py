"""Rows of the ledger: hashes of a batch, many texts at a time, and rows that are read again from their source."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlcore.data_contracts.adapters.fields import Messages
from rlcore.data_contracts.contracts.contract import Contract
from rlcore.data_contracts.errors import ContractError
from rlcore.data_contracts.gate.ledger import SPLITS, Column, Ledger, Mask, Numbers, Rows
from rlcore.data_contracts.gate.near_duplicates import bands_of, numbers_of, packed
from rlcore.data_contracts.gate.records import Origin, canonical_json
from rlcore.data_contracts.gate.row_rules import RowCheckConfig
from rlcore.data_contracts.gate.stream import Batch, RowStream
from rlcore.data_contracts.text import (
    exact_text,
    prompt_hash,
    question_messages,
    question_text,
    visible_form,
)

_PARTS = 2**16  # rows that a line may make, generously
MIN_TOKENS = 3  # shortest question that is searched in the history of other conversations: "Why?" is in many


@dataclass(frozen=True, kw_only=True)
class _Prompt:
    """Compared texts of a conversation; see the columns of the ledger.

    ``words``: the words and signs of its question; none without a search for near duplicates.
    """

    spelling: int
    order: int
    key: str
    question: str
    turns: tuple[str, ...]
    words: Sequence[str]


def hash_rows(batch: Batch, contract: Contract, terms: RowCheckConfig) -> tuple[dict[str, Column], Numbers]:
    """Return the columns of the ledger without results of checks, and 128 bits of each row's content."""
    rows = batch.rows
    columns = {**_hash_prompts(rows, terms), **_hash_answers(rows, contract, terms)}
    columns["line"] = np.array(batch.lines, dtype=np.int64)
    columns["part"] = parts_of(columns["line"])
    columns["split"] = np.array([SPLITS.index(row.get("split", "")) for row in rows], dtype=np.int8)
    columns["name"] = numbers_of([row[contract.id_column] for row in rows])
    return columns, _digests(rows, contract.carried)


def _hash_prompts(rows: Sequence[dict[str, Any]], terms: RowCheckConfig) -> dict[str, Column]:
    known: dict[tuple[str, ...], int] = {}
    found: list[_Prompt] = []
    places = np.empty(len(rows), dtype=np.int64)
    for row, one in enumerate(rows):
        texts = tuple(text for turn in one["messages"] for text in (turn["role"], turn["content"]))
        if texts not in known:
            known[texts] = len(found)
            found.append(prompt_of(one["messages"], terms))
        places[row] = known[texts]
    sizes = np.array([len(one.turns) for one in found], dtype=np.int64)[places] if found else places
    return {
        "spelling": np.array([one.spelling for one in found], dtype=np.uint64)[places],
        "order": np.array([one.order for one in found], dtype=np.uint64)[places],
        "key": numbers_of([one.key for one in found])[places],
        "question": _numbers_or_zero([one.question for one in found])[places],
        "bands": bands_of([packed(one.words) for one in found])[places],
        "turn_row": np.repeat(np.arange(len(rows)), sizes),
        "turn_key": numbers_of([turn for place in places.tolist() for turn in found[place].turns]),
    }


def prompt_of(messages: Messages, terms: RowCheckConfig) -> _Prompt:
    """Return the compared texts of a conversation, by the settings."""
    digest = prompt_hash(messages)
    question = question_messages(messages)
    same = exact_text if terms.is_exact else question_text
    found = [question_text(turn["content"]) for turn in question]
    texts = [exact_text(turn["content"]) for turn in question] if terms.is_exact else found
    lines = [f"{turn['role']}: {text}" for turn, text in zip(question, texts, strict=True)]
    key = "\n".join(lines)
    words = " ".join(found).split() if terms.keeps_apart else []
    is_alone = len(question) == 1
    turns: tuple[str, ...] = ()
    if terms.keeps_apart and not is_alone:
        begun = [end for end, turn in enumerate(question[:-1], start=1) if end > 1 and turn["role"] == "user"]
        turns = (*(same(turn["content"]) for turn in messages), *("\n".join(lines[:end]) for end in begun))
    return _Prompt(
        spelling=int(digest[:16], 16),
        order=int(hashlib.sha256(f"{terms.seed}/{digest}".encode()).hexdigest()[:16], 16),
        key=key,
        question=(texts[0] if is_alone else key) if len(words) >= MIN_TOKENS else "",
        turns=turns,
        words=words,
    )


def _hash_answers(rows: Sequence[dict[str, Any]], contract: Contract, terms: RowCheckConfig) -> dict[str, Column]:
    def numbers(name: str) -> Numbers:
        return numbers_of([row[name] if terms.is_exact else visible_form(row[name]) for row in rows])

    answers = [numbers(name) for name in contract.answers]
    is_of_pairs = len(answers) == 2
    none = np.zeros(len(rows), dtype=np.uint64)
    gaps = [len(row["chosen"]) - len(row["rejected"]) for row in rows] if is_of_pairs else [0] * len(rows)
    return {
        "answers": np.stack(answers, axis=1) if answers else np.zeros((len(rows), 0), dtype=np.uint64),
        "reference": numbers("reference") if "reference" in contract.columns else none,
        "set_name": numbers_of([row["set_id"] for row in rows]) if is_of_pairs else none,
        "weight": np.array([row["weight"] for row in rows] if is_of_pairs else none, dtype=np.float64),
        "longer": np.sign(gaps).astype(np.int8),
    }


def _numbers_or_zero(texts: Sequence[str]) -> Numbers:
    return np.where(np.array([bool(text) for text in texts], dtype=bool), numbers_of(texts), 0)


def parts_of(lines: Column) -> Column:
    """Return row numbers within each line, from 0: rows of one line are adjacent, and in one batch."""
    starts = np.flatnonzero(np.diff(lines, prepend=-1))
    sizes = np.diff(starts, append=len(lines))
    return (np.arange(len(lines)) - np.repeat(starts, sizes)).astype(np.int32)


def _digests(rows: Sequence[dict[str, Any]], without: Sequence[str]) -> Numbers:
    if without:
        rows = [{name: value for name, value in row.items() if name not in without} for row in rows]
    content = b"".join(hashlib.blake2b(canonical_json(row), digest_size=16).digest() for row in rows)
    return np.frombuffer(content, dtype="<u8").astype(np.uint64).reshape(-1, 2)


@dataclass(frozen=True, kw_only=True)
class Found:
    """Rows with their indices in the ledger."""

    places: Rows
    rows: list[dict[str, Any]]
    origins: list[Origin]

    def only(self, mask: Mask) -> Found:
        """Select rows by a mask."""
        hits = np.flatnonzero(mask).tolist()
        return Found(
            places=self.places[hits],
            rows=[self.rows[hit] for hit in hits],
            origins=[self.origins[hit] for hit in hits],
        )


def look_up(stream: RowStream, ledger: Ledger, places: Rows) -> Iterator[Found]:
    """Read the rows at ``places`` (ascending) in their order, a batch at a time.

    Raises:
        ContractError: some of them no longer exist.
    """
    if not len(places):
        return
    num_found = 0
    wanted = np.zeros(int(ledger.line[places[-1]]) + 1, dtype=bool)
    wanted[ledger.line[places]] = True
    codes = _codes(ledger.line[places], ledger.part[places])
    for batch in stream.batches(wanted):
        lines = np.array(batch.lines, dtype=np.int64)
        own = _codes(lines, parts_of(lines))
        at = np.minimum(np.searchsorted(codes, own), len(codes) - 1)
        found = Found(places=places[at], rows=batch.rows, origins=batch.origins).only(codes[at] == own)
        num_found += len(found.rows)
        yield found
    if num_found != len(places):
        raise source_changed_error(stream.source.name)


def source_changed_error(source: str) -> ContractError:
    """Return the error for a source that has changed between two reads."""
    return ContractError("the file changed while it was read", where=source, fix="run again")


def _codes(lines: Column, parts: Column) -> Rows:
    return lines * _PARTS + parts
