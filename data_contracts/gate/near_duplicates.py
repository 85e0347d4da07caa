"""Near duplicates: questions with equal numbers and signs, and nearly equal words.

Candidate pairs come from MinHash (Broder 1997) in bands (Indyk and Motwani 1998); their words then decide. Of questions
of 3 words with one more word 98 % are candidates, of 5 words and more 99.8 %.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import pandas as pd
from numpy.typing import NDArray

T = TypeVar("T")
Numbers = NDArray[np.uint64]
Rows = NDArray[np.int64]

BANDS, WORDS_A_BAND = 8, 3
MAX_BUCKET = 64  # questions that share a band with a held-out one: more are a template, and not one question
MAX_PAIRS = 500_000
WORDS_AN_EDIT = 30  # words of both texts together for each word that may be missing or added; one always may
_MAX_REMEMBERED = 2**18
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_STEP = np.uint64(0xD1342543DE82EF95)
_AT_A_TIME = 1_024  # questions whose words fit the cache of a processor


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """Candidate pairs: indices ``train[i]`` and ``held_out[i]``.

    ``crowded``: held-out questions that were not compared with all others, because too many share a band.
    """

    train: Rows
    held_out: Rows
    crowded: int = 0


def numbers_of(texts: Sequence[str]) -> Numbers:
    """Hash each text to 64 bits (SipHash with a fixed key), equally on every machine."""
    cells = np.empty(len(texts), dtype=object)
    cells[:] = texts
    return pd.util.hash_array(cells, categorize=False)


def packed(words: Sequence[str]) -> bytes:
    """Pack a 64-bit number for each word into 8 bytes; its lowest bit is 1 for a sign."""
    return b"".join(map(_HASHES.__getitem__, words))


def unpacked(texts: Sequence[bytes]) -> tuple[Numbers, Rows]:
    """Return the numbers of all texts in one array, and the number of each text."""
    sizes = np.array([len(one) for one in texts], dtype=np.int64) // 8
    return np.frombuffer(b"".join(texts), dtype="<u8").astype(np.uint64), sizes


def bands_of(questions: Sequence[bytes]) -> NDArray[np.uint32]:
    """Return 8 numbers for each question, some of which are equal for near duplicates.

    ``questions``: the words and signs of each, :func:`packed`. uint32 [questions, 8]. Questions with other numbers or
    signs share none. Zero is for questions without a word.
    """
    found = np.zeros((len(questions), BANDS), dtype=np.uint32)
    for start in range(0, len(questions), _AT_A_TIME):
        some = questions[start : start + _AT_A_TIME]
        filled = np.array([place for place, hashes in enumerate(some) if hashes], dtype=np.int64)
        if len(filled):
            found[start + filled] = _bands([hashes for hashes in some if hashes])
    return found


def _bands(questions: Sequence[bytes]) -> NDArray[np.uint32]:
    hashes, sizes = unpacked(questions)
    is_sign = (hashes & np.uint64(1)).astype(bool)
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    signs = _in_order(hashes, is_sign, starts, sizes)
    found = np.zeros((len(questions), BANDS), dtype=np.uint32)
    turned = np.empty_like(hashes)
    for band in range(BANDS):
        mixed = signs.copy()
        for factor in _FACTORS[band * WORDS_A_BAND : (band + 1) * WORDS_A_BAND]:
            np.multiply(hashes, factor, out=turned)  # another order of all words for each factor
            mixed = _mix(mixed + np.minimum.reduceat(turned, starts))
        found[:, band] = (mixed >> np.uint64(32)) | np.uint64(1)
    found[np.add.reduceat(~is_sign, starts) == 0] = 0
    return found


def is_sign_of_meaning(token: str) -> bool:
    """Return True if a token is a number, a sign or a variable's name, which near duplicates must share."""
    return not token[0].isalpha() or (len(token) == 1 and token.isascii() and token not in "ai")


def candidates(train: NDArray[np.uint32], held_out: NDArray[np.uint32]) -> Candidates:
    """Return pairs of unique training and held-out questions that share a band."""
    pairs: Rows = np.empty(0, dtype=np.int64)  # a pair as one number, the index in train first
    crowded: set[int] = set()
    for band in range(BANDS):
        order = np.argsort(train[:, band], kind="stable")
        values = train[order, band]
        first = np.searchsorted(values, held_out[:, band], side="left")
        sizes = np.searchsorted(values, held_out[:, band], side="right") - first
        sizes[held_out[:, band] == 0] = 0
        crowded |= set(np.flatnonzero(sizes > MAX_BUCKET).tolist())
        sizes = np.minimum(sizes, MAX_BUCKET)
        places = np.repeat(first - np.concatenate([[0], np.cumsum(sizes)[:-1]]), sizes) + np.arange(sizes.sum())
        pairs = np.union1d(pairs, order[places] * len(held_out) + np.repeat(np.arange(len(held_out)), sizes))
    places_in_train, places_held_out = np.divmod(pairs, max(1, len(held_out)))
    crowded |= set(np.unique(places_held_out[MAX_PAIRS:]).tolist())
    return Candidates(train=places_in_train[:MAX_PAIRS], held_out=places_held_out[:MAX_PAIRS], crowded=len(crowded))


def is_near_duplicate(one: Sequence[str], other: Sequence[str]) -> bool:
    """Return True if two questions have the same numbers and signs in order, and all but a few words."""
    if list(filter(is_sign_of_meaning, one)) != list(filter(is_sign_of_meaning, other)):
        return False
    return _within(one, other, max(1, (len(one) + len(other)) // WORDS_AN_EDIT))


def _within(one: Sequence[str], other: Sequence[str], limit: int) -> bool:
    """Return True if at most ``limit`` words must be removed or added to turn one into the other (Myers 1986)."""
    reached = {1: 0}
    for edits in range(limit + 1):
        for diagonal in range(-edits, edits + 1, 2):
            left, right = reached.get(diagonal - 1, -1), reached.get(diagonal + 1, -1)
            x = right if diagonal == -edits or (diagonal != edits and left < right) else left + 1
            y = x - diagonal
            while x < len(one) and 0 <= y < len(other) and one[x] == other[y]:
                x, y = x + 1, y + 1
            if x >= len(one) and y >= len(other):
                return True
            reached[diagonal] = x
    return False


def _hash_of(token: str) -> bytes:
    digest = int.from_bytes(hashlib.blake2b(token.encode(), digest_size=8).digest(), "little")
    return (digest & ~1 | is_sign_of_meaning(token)).to_bytes(8, "little")


def _mix(numbers: Numbers) -> Numbers:
    spread = (numbers ^ (numbers >> np.uint64(32))) * _MULTIPLIER
    return spread ^ (spread >> np.uint64(29))


def _in_order(values: Numbers, counts: NDArray[np.bool_], starts: Rows, sizes: Rows) -> Numbers:
    passed = np.cumsum(counts, dtype=np.int64)
    ranks = passed - np.repeat(passed[starts] - counts[starts], sizes)
    return np.add.reduceat(np.where(counts, _mix(values + _STEP * ranks.astype(np.uint64)), 0), starts)


class BoundedMemo(dict[str, T], Generic[T]):
    """Bounded cache: ``found[text]`` is ``make(text)``. It is cleared when it has ``most`` texts.

    ``map(found.__getitem__, texts)`` costs a third of the same with ``functools.lru_cache``.
    """

    def __init__(self, make: Callable[[str], T], *, most: int) -> None:
        super().__init__()
        self._make, self._most = make, most

    def __missing__(self, text: str) -> T:
        if len(self) >= self._most:
            self.clear()
        made = self[text] = self._make(text)
        return made


_HASHES = BoundedMemo(_hash_of, most=_MAX_REMEMBERED)
_FACTORS = _mix(_STEP * np.arange(1, BANDS * WORDS_A_BAND + 1, dtype=np.uint64)) | np.uint64(1)
