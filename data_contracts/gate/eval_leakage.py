"""Leaks: training prompts that are nearly an evaluation prompt, or have one in their history."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rlcore.data_contracts.adapters.fields import Messages
from rlcore.data_contracts.gate.ledger import NO_ROWS, Column, Ledger, Mask, Numbers, Rows
from rlcore.data_contracts.gate.near_duplicates import BANDS, bands_of, candidates, is_near_duplicate, numbers_of
from rlcore.data_contracts.gate.row_hashes import prompt_of
from rlcore.data_contracts.gate.row_rules import RowCheckConfig

NEAR = "is nearly a prompt that is evaluated on"
IN_HISTORY = "has an evaluation prompt in its history"
MAX_NEAR = 8  # training prompts that are nearly one prompt: more are a template with different words
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
        bands=bands_of([one.hashes for one in chosen]).reshape(-1, BANDS),
        tokens=[one.words.split() for one in chosen],
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
    """Return different training prompts, the first held-out prompt that each nearly matches, and the skipped number."""
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
    """Return a column's values at held-out prompts, of which external ones have negative indices."""
    values = np.empty((len(held_out), *own.shape[1:]), dtype=own.dtype)
    is_own = held_out >= 0
    values[is_own] = own[held_out[is_own]]
    values[~is_own] = foreign[-1 - held_out[~is_own]]
    return values
