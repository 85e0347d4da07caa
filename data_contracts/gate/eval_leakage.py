"""Leaks: training prompts that are nearly an evaluation prompt, or have one in their history; and shared n-grams.

An n-gram of 13 words that a training row shares with an evaluation prompt is the usual test of contamination.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from rlcore.data_contracts.adapters.fields import Messages
from rlcore.data_contracts.contracts.contract import Contract
from rlcore.data_contracts.gate.ledger import NO_ROWS, Column, Ledger, Mask, Numbers, Rows
from rlcore.data_contracts.gate.near_duplicates import (
    BANDS,
    bands_of,
    candidates,
    is_near_duplicate,
    numbers_of,
    packed,
    unpacked,
)
from rlcore.data_contracts.gate.row_hashes import prompt_of
from rlcore.data_contracts.gate.row_rules import RowCheckConfig
from rlcore.data_contracts.text import hashes_of_words

NEAR = "is nearly a prompt that is evaluated on"
IN_HISTORY = "has an evaluation prompt in its history"
MAX_NEAR = 8  # training prompts that are nearly one prompt: more are a template with different words
NGRAM_WORDS = 13  # the usual length for contamination (GPT-3, appendix C)
FEWEST_WORDS = 8  # as there: fewer words are a common phrase
_BASE = np.uint64(0x9E3779B97F4A7C15)
_FILTER_BITS = 22
_AT_A_TIME = 512  # rows whose words fit the cache of a processor
Tokens = Callable[[Rows], Mapping[int, Sequence[str]]]


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """Evaluation prompts of other datasets, in the form of the ledger."""

    messages: Sequence[Messages]
    keys: Numbers
    questions: Numbers
    bands: Column
    tokens: Sequence[Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class LeakedRows:
    """Training rows, ascending, with the matched prompt: a row of the ledger, or ``-1 - place`` in :class:`Evaluated`.

    ``in_history``: the prompt is in the row's history. ``crowded``: evaluation prompts that resemble too many others: a
    template, not a leak.
    """

    rows: Rows
    others: Rows
    in_history: Mask
    crowded: int

    @classmethod
    def none(cls) -> LeakedRows:
        """Return an empty result."""
        return cls(rows=NO_ROWS, others=NO_ROWS, in_history=np.empty(0, dtype=bool), crowded=0)


def evaluated_of(conversations: Sequence[Messages], terms: RowCheckConfig) -> Evaluated:
    """Return the prompts of other datasets, each once."""
    prompts = [prompt_of(messages, terms) for messages in conversations]
    first = list({one.key: place for place, one in reversed(list(enumerate(prompts)))}.values())[::-1]
    chosen = [prompts[place] for place in first]
    questions = numbers_of([one.question for one in chosen])
    questions[np.array([not one.question for one in chosen], dtype=bool)] = 0
    return Evaluated(
        messages=[conversations[place] for place in first],
        keys=numbers_of([one.key for one in chosen]),
        questions=questions,
        bands=bands_of([packed(one.words) for one in chosen]).reshape(-1, BANDS),
        tokens=[one.words for one in chosen],
    )


def find_leaks(ledger: Ledger, is_train: Mask, is_eval: Mask, evaluated: Evaluated, *, tokens: Tokens) -> LeakedRows:
    """Find the training rows that nearly match an evaluation row of the ledger, or an external prompt.

    ``tokens``: returns the words and signs of rows of the ledger by index.
    """
    _, first = np.unique(ledger.key, return_index=True)
    is_first = np.zeros(len(ledger), dtype=bool)
    is_first[first] = True
    held_out = np.concatenate([np.flatnonzero(is_eval & is_first), -1 - np.arange(len(evaluated.messages))])
    rows, others = _in_history(ledger, is_train, held_out, evaluated)
    near, near_others, crowded = _near(ledger, np.flatnonzero(is_train & is_first), held_out, evaluated, tokens)
    like = np.flatnonzero(is_train & np.isin(ledger.key, ledger.key[near]) & ~np.isin(np.arange(len(ledger)), rows))
    order = np.argsort(ledger.key[near], kind="stable")
    at = np.searchsorted(ledger.key[near][order], ledger.key[like])
    found = np.concatenate([rows, like])
    sorted_ = np.argsort(found, kind="stable")
    return LeakedRows(
        rows=found[sorted_],
        others=np.concatenate([others, near_others[order][at]])[sorted_],
        in_history=(np.arange(len(found)) < len(rows))[sorted_],
        crowded=crowded,
    )


def _in_history(ledger: Ledger, is_train: Mask, held_out: Rows, evaluated: Evaluated) -> tuple[Rows, Rows]:
    questions = _of_both(ledger.question, evaluated.questions, held_out)
    known = held_out[questions != 0]
    order = np.argsort(questions[questions != 0], kind="stable")
    values = questions[questions != 0][order]
    turns = is_train[ledger.turn_row]
    rows, keys = ledger.turn_row[turns], ledger.turn_key[turns]
    if not len(values) or not len(rows):
        return NO_ROWS, NO_ROWS
    at = np.minimum(np.searchsorted(values, keys), len(values) - 1)
    is_hit = values[at] == keys
    found, first = np.unique(rows[is_hit], return_index=True)
    return found, known[order][at[is_hit][first]]


def _near(ledger: Ledger, train: Rows, held_out: Rows, evaluated: Evaluated, tokens: Tokens) -> tuple[Rows, Rows, int]:
    """Return training prompts, the first held-out prompt that each nearly matches, and the skipped number."""
    pairs = candidates(ledger.bands[train], _of_both(ledger.bands, evaluated.bands, held_out))
    rows, others = train[pairs.train], held_out[pairs.held_out]
    is_other = ledger.key[rows] != _of_both(ledger.key, evaluated.keys, others)
    rows, others = rows[is_other], others[is_other]
    words = tokens(np.unique(np.concatenate([rows, others[others >= 0]])))
    near = [
        (row, other)
        for row, other in zip(rows.tolist(), others.tolist(), strict=True)
        if is_near_duplicate(words[row], words[other] if other >= 0 else evaluated.tokens[-1 - other])
    ]
    sizes = Counter(other for _, other in near)
    found = {row: other for row, other in reversed(near) if sizes[other] <= MAX_NEAR}
    crowded = pairs.crowded + sum(size > MAX_NEAR for size in sizes.values())
    return np.array(list(found), dtype=np.int64), np.array(list(found.values()), dtype=np.int64), crowded


def _of_both(own: Column, foreign: Column, held_out: Rows) -> Column:
    values = np.empty((len(held_out), *own.shape[1:]), dtype=own.dtype)
    is_own = held_out >= 0
    values[is_own] = own[held_out[is_own]]
    values[~is_own] = foreign[-1 - held_out[~is_own]]
    return values


@dataclass(frozen=True, kw_only=True)
class SharedWords:
    """Number of consecutive words that no training row may share with an evaluation prompt, and the action.

    ``warn``: count it in the report. ``quarantine``: reject the row. ``refuse``: reject the dataset.
    """

    size: int = NGRAM_WORDS
    action: Literal["warn", "quarantine", "refuse"] = "warn"

    @property
    def reason(self) -> str:
        return f"shares {self.size} words in a row, or a whole shorter prompt, with a prompt that is evaluated on"


@dataclass(frozen=True, kw_only=True)
class _Runs:
    """N-grams of one length of evaluation prompts, sorted, each with its prompt and a mark if it was seen."""

    grams: Numbers
    owners: Rows
    is_seen: Column


class Overlap:
    """Evaluation prompts that share ``size`` consecutive words with the training rows seen so far.

    A prompt of 8 words or more, but fewer than ``size``, is one n-gram. The turns of users are compared.
    """

    def __init__(self, held_out: Sequence[Messages], *, size: int = NGRAM_WORDS) -> None:
        texts = [[turn["content"] for turn in turns if turn["role"] == "user"] for turns in held_out]
        words, owners = _words(texts)
        lengths = np.array([min(size, len(one) // 8) for one in words], dtype=np.int64)
        self._runs: dict[int, _Runs] = {}
        self._filter = np.zeros(2**_FILTER_BITS, dtype=bool)  # most n-grams of most rows are looked up only here
        for length in sorted({size, *range(min(FEWEST_WORDS, size), size)} & {*lengths.tolist()}):
            of_length = np.flatnonzero(lengths == length).tolist()
            ((_, grams, at),) = _ngrams([words[place] for place in of_length], [length])
            order = np.argsort(grams, kind="stable")
            found = owners[of_length][at[order]]
            self._runs[length] = _Runs(grams=grams[order], owners=found, is_seen=np.zeros(len(grams), dtype=bool))
            self._filter[_short(grams)] = True
        self.num_prompts, self.size = len(held_out), size

    def see(self, rows: Sequence[Sequence[str]]) -> dict[int, int]:
        """Add training rows as lists of texts; return the indices of rows that share an n-gram, with a prompt's."""
        found: dict[int, int] = {}
        for start in range(0, len(rows) if self._runs else 0, _AT_A_TIME):
            found |= {start + row: owner for row, owner in self._see_some(rows[start : start + _AT_A_TIME]).items()}
        return found

    def _see_some(self, rows: Sequence[Sequence[str]]) -> dict[int, int]:
        found: dict[int, int] = {}
        words, places = _words(rows)
        for length, grams, at in _ngrams(words, sorted(self._runs)):
            runs = self._runs[length]
            is_likely = self._filter[_short(grams)]
            likely, owners = grams[is_likely], places[at[is_likely]]
            first, last = (np.searchsorted(runs.grams, likely, side=side) for side in ("left", "right"))
            for start, end, row in zip(first.tolist(), last.tolist(), owners.tolist(), strict=True):
                if end > start:
                    runs.is_seen[start:end] = True
                    found.setdefault(row, int(runs.owners[start]))
        return found

    @property
    def num_touched(self) -> int:
        """Return the number of evaluation prompts that share an n-gram with a training row."""
        seen = [runs.owners[runs.is_seen] for runs in self._runs.values()]
        return len(np.unique(np.concatenate(seen))) if seen else 0


def texts_of(row: Mapping[str, Any], contract: Contract) -> list[str]:
    """Return the trained texts of a row: its turns without system messages, and its answers."""
    turns = [turn["content"] for turn in row["messages"] if turn["role"] != "system"]
    return [*turns, *(row[name] for name in contract.answers)]


def _short(grams: Numbers) -> Column:
    return grams >> np.uint64(64 - _FILTER_BITS)


def _words(rows: Sequence[Sequence[str]]) -> tuple[list[bytes], Rows]:
    places = np.array([place for place, texts in enumerate(rows) for _ in texts], dtype=np.int64)
    return [hashes_of_words(text) for texts in rows for text in texts], places


def _ngrams(words: Sequence[bytes], lengths: Sequence[int]) -> Iterator[tuple[int, Numbers, Rows]]:
    """Hash the n-grams of a text for each of the ascending lengths, with the text's index.

    The hash of words w is Σ w[i] B^(n-1-i), so that two parts of an n-gram give that of the whole: few sums for many
    words.
    """
    numbers, sizes = unpacked(words)
    left = np.repeat(np.cumsum(sizes), sizes) - np.arange(len(numbers))  # words from here to the end of the text
    owners = np.repeat(np.arange(len(words)), sizes)
    known = {1: numbers}
    for length in lengths:
        runs = _runs(length, known)
        is_whole = left[: len(runs)] >= length
        yield length, runs[is_whole], owners[: len(runs)][is_whole]


def _runs(length: int, known: dict[int, Numbers]) -> Numbers:
    """Return the hashes of all runs of ``length`` words, which are added to ``known``."""
    if length not in known:
        first = 2 ** ((length - 1).bit_length() - 1)  # the largest power of two below
        begin, end = _runs(first, known), _runs(length - first, known)[first:]
        known[length] = begin[: len(end)] * np.uint64(pow(int(_BASE), length - first, 2**64)) + end
    return known[length]
