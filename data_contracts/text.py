"""When two prompts count as the same: normalised text, its hash, and overlapping runs of words."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence

_WORD = re.compile(r"\w+")


def normalise(text: str) -> str:
    """Compatibility form (NFKC), case folded, blanks collapsed."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def prompt_hash(messages: Sequence[Mapping[str, str]]) -> str:
    """SHA-256 of a conversation's normalised text, in hexadecimal.

    System messages do not enter: the same question under another instruction is the same question. Nor does what comes
    after the user's last turn (a demonstration's tool calls): that is a part of the answer.
    """
    last = max((place for place, turn in enumerate(messages) if turn["role"] == "user"), default=len(messages))
    asked = [turn for turn in messages[: last + 1] if turn["role"] != "system"]
    turns = [f"{turn['role']}: {normalise(turn['content'])}" for turn in asked]
    return hashlib.sha256("\n".join(turns).encode()).hexdigest()


def words_of(text: str) -> list[str]:
    """The words of the normalised text, in order."""
    return _WORD.findall(normalise(text))


def word_ngrams(text: str, size: int) -> Iterator[str]:
    """Every run of ``size`` words of the normalised text; none when it has fewer."""
    words = words_of(text)
    return (" ".join(words[start : start + size]) for start in range(len(words) - size + 1))
