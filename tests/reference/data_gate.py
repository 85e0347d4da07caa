"""A slow and obvious data gate: one text or line at a time, nothing remembered."""

from __future__ import annotations

import hashlib
import html
import re
import unicodedata
import zlib
from collections import Counter
from functools import partial

from rlcore.data_contracts import characters, text
from rlcore.data_contracts.gate.near_duplicates import is_sign_of_meaning

_LONE = re.compile(r"(?: [.,;:!?']{1,3})+(?= |$)")


def question_text(question: str) -> str:
    """A question without what typing adds to it."""
    plain = _folded(html.unescape(question))
    piece = partial(text._piece, is_quoted=plain.startswith("'") or " '" in plain)
    words = " ".join(filter(None, map(piece, plain.split())))
    return _LONE.sub(_without_lone, words).rstrip(" .,;:?")


def _folded(question: str) -> str:
    if not question.isascii():
        return characters.folded(question)
    return characters._INVISIBLE.sub("", question).lower().translate(characters._FOLDED)


def _without_lone(found: re.Match[str]) -> str:
    before = found.string[max(0, found.start() - 2) : found.start()]
    return "" if len(before) == 2 and before.isalpha() else found.group()


def words_of(passage: str) -> list[str]:
    plain = " ".join(unicodedata.normalize("NFKC", passage).casefold().split())
    return re.findall(r"\w+", plain)


def hashes(words: list[str]) -> bytes:
    """64 bits of each word, the lowest of which says that it is a sign."""
    digests = [hashlib.blake2b(word.encode(), digest_size=8).digest() for word in words]
    numbers = [int.from_bytes(digest, "little") & ~1 for digest in digests]
    pairs = zip(numbers, map(is_sign_of_meaning, words), strict=True)
    return b"".join((number | is_sign).to_bytes(8, "little") for number, is_sign in pairs)


def script_of(passage: str) -> str:
    counts = Counter(unicodedata.name(one, "unnamed").split()[0].lower() for one in passage if one.isalpha())
    return min(counts, key=lambda name: (-counts[name], name)) if counts else "(no letters)"


def word_of(passage: str) -> str:
    """The word with the smallest CRC-32."""
    return min(words_of(passage), key=lambda word: (zlib.crc32(word.encode()), word), default="(no words)")
