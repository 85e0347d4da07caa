"""Runs of 13 words that training prompts share with evaluation prompts, the usual sign of contamination."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from data_contracts.fields import Messages
from data_contracts.ledger import Column, Numbers
from data_contracts.near import hashes_of
from data_contracts.text import words_of

NGRAM_WORDS = 13  # the usual length for contamination (GPT-3, appendix C)
_BASE = np.uint64(0x9E3779B97F4A7C15)
_FILTER_BITS = 22


class Overlap:
    """Which evaluation prompts share a run of words with the training prompts that went by."""

    def __init__(self, held_out: Sequence[Messages]) -> None:
        grams, owners = _ngrams(held_out)
        order = np.argsort(grams, kind="stable")
        self._grams, self._owners = grams[order], owners[order]
        self._is_seen = np.zeros(len(grams), dtype=bool)
        self._filter = np.zeros(2**_FILTER_BITS, dtype=bool)  # most runs of most rows are looked up here alone
        self._filter[self._short(grams)] = True
        self.num_prompts = len(held_out)

    def see(self, train: Sequence[Messages]) -> None:
        """Training prompts go by."""
        if not len(self._grams):
            return
        grams, _ = _ngrams(train)
        likely = grams[self._filter[self._short(grams)]]
        first, last = (np.searchsorted(self._grams, likely, side=side) for side in ("left", "right"))
        for start, end in zip(first.tolist(), last.tolist(), strict=True):
            self._is_seen[start:end] = True

    @property
    def num_touched(self) -> int:
        """Number of evaluation prompts that share a run with a training prompt."""
        return len(np.unique(self._owners[self._is_seen]))

    @staticmethod
    def _short(grams: Numbers) -> Column:
        return grams >> np.uint64(64 - _FILTER_BITS)


def _ngrams(prompts: Sequence[Messages]) -> tuple[Numbers, Column]:
    """A number for each run of 13 words in a turn of a user, and the prompt that it is from."""
    texts = [
        (place, turn["content"]) for place, turns in enumerate(prompts) for turn in turns if turn["role"] == "user"
    ]
    words = [words_of(text) for _, text in texts]
    sizes = np.array([len(one) for one in words], dtype=np.int64)
    numbers = hashes_of(words)
    runs = np.zeros(max(0, len(numbers) - NGRAM_WORDS + 1), dtype=np.uint64)
    for place in range(NGRAM_WORDS):
        runs = runs * _BASE + numbers[place : place + len(runs)]
    left = np.repeat(np.cumsum(sizes), sizes) - np.arange(len(numbers))  # words from here to the end of the text
    owners = np.repeat(np.array([place for place, _ in texts], dtype=np.int64), sizes)
    is_whole = left[: len(runs)] >= NGRAM_WORDS
    return runs[is_whole], owners[: len(runs)][is_whole]
