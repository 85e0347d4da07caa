"""Search for texts of rows in other texts: whole, in part, escaped or reformatted.

Texts are compared by their letters and digits, as the gate normalizes them (NFKC, no case), after JSON and HTML escapes
are resolved. A text quotes a row if it has ``QUOTE`` consecutive letters and digits of one of the row's texts that no
remaining row has. A row's text with fewer, but at least ``SHORTEST``, is searched as a whole, unless a remaining row
has the same text. Shorter texts identify nobody; they are found in tables alone, by prompt and id.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlcore.data_contracts.text import normalise

QUOTE, SHORTEST = 24, 8  # letters and digits
REDACTED = "[erased]"
_PIECE, _OVERLAP = 2**22, 2**12  # characters that are searched together, and shared by two pieces
_WORD = re.compile(r"[^\W_]+")
_ESCAPE = re.compile(r"\\+(?:u([0-9a-fA-F]{4})|[nrt])")
_FACTOR = np.uint64(0x9E3779B97F4A7C15)

Windows = NDArray[np.uint64]
_NONE: Windows = np.empty(0, dtype=np.uint64)


@dataclass(frozen=True, kw_only=True)
class Quotes:
    """Marks of rows in texts: sorted hashes of windows, short whole texts, and words that no other row has."""

    windows: Windows
    short: frozenset[str]
    words: frozenset[str]

    def are_in(self, text: str) -> bool:
        """Return True if a text quotes one of the rows."""
        return any(self._are_in_piece(text[start : start + _PIECE + _OVERLAP]) for start in range(0, len(text), _PIECE))

    def _are_in_piece(self, text: str) -> bool:
        words = reduced(text)
        if any(each in words for each in self.short):
            return True
        return len(self.windows) > 0 and bool(_isin(windows_of(words), self.windows).any())

    def without(self, kept: Iterable[Sequence[str]]) -> Quotes:
        """Return the marks of these rows that others, whose texts are given in batches, do not have."""
        windows, short, words = self.windows, set(self.short), set(self.words)
        for texts in kept:
            forms = {reduced(text) for text in {*texts}}
            joined = "".join(forms)  # windows over two texts are in no row
            windows = windows[~_isin(windows, np.sort(windows_of(joined)))]
            short -= forms
            words.difference_update(joined.split())
        return Quotes(windows=windows, short=frozenset(short), words=frozenset(words))


def quotes_of(texts: Iterable[str]) -> Quotes:
    """Return all marks of rows with these texts."""
    forms = {reduced(text) for text in texts}
    windows = [windows_of(form) for form in forms]
    sizes = {form: len(form.replace(" ", "")) for form in forms}
    return Quotes(
        windows=np.unique(np.concatenate([_NONE, *windows])),
        short=frozenset(form for form, size in sizes.items() if SHORTEST <= size < QUOTE),
        words=frozenset(word for form in forms for word in form.split()),
    )


def reduced(text: str) -> str:
    """Return the words of a text with a blank before and after each."""
    plain = html.unescape(_ESCAPE.sub(_resolved, text))
    return " ".join(["", *_WORD.findall(normalise(plain)), ""])


def windows_of(words: str) -> Windows:
    """Return the hash of each ``QUOTE`` consecutive letters and digits of a reduced text."""
    letters = words.replace(" ", "").encode("utf-32-le", "surrogatepass")
    codes = np.frombuffer(letters, dtype="<u4").astype(np.uint64)
    count = len(codes) - QUOTE + 1
    if count <= 0:
        return _NONE
    codes = (codes + np.uint64(1)) * _FACTOR
    codes ^= codes >> np.uint64(29)
    found = np.zeros(count, dtype=np.uint64)
    for place in range(QUOTE):
        found = found * _FACTOR + codes[place : place + count]
    return found


def strings_in(value: Any) -> Iterator[str]:
    """Yield all texts in nested lists and mappings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from strings_in(each)


def redacted(value: Any, quotes: Quotes) -> Any:
    """Return a JSON value with ``REDACTED`` in place of each text that quotes a row, also in JSON inside of a text."""
    if isinstance(value, Mapping):
        return {name: redacted(each, quotes) for name, each in value.items()}
    if isinstance(value, list):
        return [redacted(each, quotes) for each in value]
    return redacted_text(value, quotes) if isinstance(value, str) and quotes.are_in(value) else value


def redacted_text(text: str, quotes: Quotes) -> str:
    """Return a text that quotes a row without the quote: JSON without the texts that do, anything else not at all."""
    try:
        found = json.dumps(redacted(json.loads(text), quotes), ensure_ascii=False)
    except ValueError:
        return REDACTED
    return json.dumps(REDACTED) if quotes.are_in(found) else found


def _isin(values: Windows, ordered: Windows) -> NDArray[np.bool_]:
    """Return a mask of the values that sorted ones contain; ``np.isin`` would sort both."""
    if not len(ordered):
        return np.zeros(len(values), dtype=bool)
    places = np.minimum(np.searchsorted(ordered, values), len(ordered) - 1)
    return np.equal(ordered[places], values)


def _resolved(found: re.Match[str]) -> str:
    return chr(int(found[1], 16)) if found[1] else " "
