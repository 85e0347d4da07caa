"""Equality of texts, from the strictest comparison to the widest.

- ``visible_form``: the text as a reader sees it. Answers are compared by it.
- ``prompt_hash``: a question's spelling without case, width and blanks. It divides and orders rows and must not change.
- ``prompt_key``: a question in any spelling. The search for leaks and contradictions uses it.
"""

from __future__ import annotations

import hashlib
import html
import re
import unicodedata
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import groupby

from rlcore.data_contracts.characters import fold_confusables, folded, without_invisible
from rlcore.data_contracts.gate.near_duplicates import BoundedMemo, packed

_WORD = re.compile(r"\w+")
_NUMBER = re.compile(r"([0-9]+(?:[.,:][0-9]+)*)")
_MAY_BE_LONE = re.compile(r" [.,;:!?']")
_LONE = re.compile(r"(?: [.,;:!?']{1,3})+(?= |$)")
_SIGNS = frozenset("*/%&\\@#_{}")  # punctuation by its category, and an operator or a part of a name by its use
_AT_THE_END = " .,;:?"
_ENDS = frozenset(".,;:?'")  # punctuation only, also after a number
_MOST_PUNCTUATION = 3


def normalise(text: str) -> str:
    """Normalize a text: NFKC, case folded, blanks collapsed."""
    return " ".join(normalised_chunks(text))


def normalised_chunks(text: str) -> list[str]:
    """Return the texts between the blanks of :func:`normalise`."""
    return (text if text.isascii() else unicodedata.normalize("NFKC", text)).casefold().split()


def visible_form(text: str) -> str:
    """Return the visible form: NFC, nothing invisible, no outer or double blanks, lookalikes Latin."""
    seen = text if text.isascii() else fold_confusables(unicodedata.normalize("NFC", without_invisible(text)))
    return "\n".join(filter(None, [" ".join(line.split()) for line in seen.splitlines()]))


def question_messages(messages: Sequence[Mapping[str, str]]) -> list[Mapping[str, str]]:
    """Return the turns that make a conversation's question.

    System messages do not count: the same question under another instruction is the same question. Turns after the
    user's last one belong to the answer.
    """
    last = max((place for place, turn in enumerate(messages) if turn["role"] == "user"), default=len(messages))
    return [turn for turn in messages[: last + 1] if turn["role"] != "system"]


def prompt_hash(messages: Sequence[Mapping[str, str]]) -> str:
    """Return the SHA-256 of a conversation's normalized text, in hexadecimal."""
    turns = [f"{turn['role']}: {normalise(turn['content'])}" for turn in question_messages(messages)]
    return hashlib.sha256("\n".join(turns).encode()).hexdigest()


def prompt_key(messages: Sequence[Mapping[str, str]], *, is_exact: bool = False) -> str:
    """Return the common text of conversations with the same question: roles and texts."""
    same = exact_text if is_exact else question_text
    return "\n".join(f"{turn['role']}: {same(turn['content'])}" for turn in question_messages(messages))


def question_text(text: str) -> str:
    """Reduce a question to its words, numbers and operators with one blank between.

    Case, width, invisible characters, HTML entities, lookalikes, the script of digits, quotes and punctuation next to
    words are removed. Characters that may have meaning stay: operators, brackets and signs next to a number or a single
    letter, ``5!``, a decimal point, runs of symbols (``([)]``). Thus ``4+3`` is ``4 + 3`` and not ``4-3``.
    """
    plain = folded(html.unescape(text) if "&" in text else text)
    is_quoted = plain.startswith("'") or " '" in plain  # else a mark after a number is a prime
    words = " ".join(filter(None, map((_QUOTED if is_quoted else _PIECES).__getitem__, plain.split())))
    if _MAY_BE_LONE.search(words):  # a tenth of the time of searching the whole pattern
        words = _LONE.sub(_without_lone, words)
    return words.rstrip(_AT_THE_END)


def exact_text(text: str) -> str:
    """Return a question for exact comparison, such as code: NFC, with plain line ends."""
    return unicodedata.normalize("NFC", text.replace("\r\n", "\n")).strip()


def words_of(text: str) -> list[str]:
    """Return the words of the normalized text, in order."""
    return _WORD.findall(normalise(text))


def hashes_of_words(text: str) -> bytes:
    """Return the hashes of :func:`words_of`, as in ``near_duplicates.packed``; no word contains a blank."""
    return b"".join(map(_WORD_HASHES.__getitem__, normalised_chunks(text)))


def _piece(chunk: str, *, is_quoted: bool = False) -> str:
    """Split the text between two blanks into words, numbers and signs that count, with a blank between."""
    word = chunk.rstrip(".,;:?!")
    if (
        word.isascii()
        and word.isalpha()
        and (word == chunk or (len(word) > 1 and len(chunk) - len(word) <= _MOST_PUNCTUATION))
    ):
        return word  # most chunks, in a tenth of the time
    parts = _parts(chunk)
    kept = []
    for place, part in enumerate(parts):
        before = parts[place - 1] if place else ""
        after = parts[place + 1] if place + 1 < len(parts) else ""
        if _is_text(part):
            kept.append(part)
        elif not _is_punctuation(part, before, after, is_quoted=is_quoted):
            kept += part
    return " ".join(kept)


def _without_lone(found: re.Match[str]) -> str:
    before = found.string[max(0, found.start() - 2) : found.start()]
    return "" if len(before) == 2 and before.isalpha() else found.group()


def _parts(chunk: str) -> list[str]:
    found = []
    for place, piece in enumerate(_NUMBER.split(chunk)):
        if place % 2:
            found.append(piece)
        else:
            for kind, run in groupby(piece, _kind):
                together = "".join(run)
                found += together if kind == "sign of a word" else [together]
    return found


def _kind(one: str) -> str:
    if unicodedata.category(one)[0] not in "LM":
        return "other"
    # scripts without blanks between words: each sign stands for itself
    return "sign of a word" if "\u0e00" <= one <= "\u0eff" or "\u3040" <= one <= "\u9fff" else "letters"


def _is_text(part: str) -> bool:
    return part[0].isdigit() or unicodedata.category(part[0])[0] in "LM"


def _is_word(part: str) -> bool:
    return _is_text(part) and not part[0].isdigit() and (len(part) > 1 or not part.isascii())


def _is_punctuation(part: str, before: str, after: str, *, is_quoted: bool) -> bool:
    """Return True if a run of signs has no meaning, by the adjacent texts before and after it."""
    sides = [side for side in (before, after) if side]
    is_emphasis = len(sides) == 1 and _is_word(sides[0])
    if len(part) > _MOST_PUNCTUATION or not all(_is_mark(one) or (is_emphasis and one in "*_~") for one in part):
        return False
    if all(map(_is_word, sides)):
        return bool(sides) or set(part) == {"'"}
    ends = _ENDS if is_quoted else _ENDS - {"'"}  # f' is not f
    return set(part) <= (ends if before else {"'"}) and not (before and after)


def _is_mark(one: str) -> bool:
    return unicodedata.category(one)[0] == "P" and one not in _SIGNS


_PIECES, _QUOTED = BoundedMemo(_piece, most=2**17), BoundedMemo(partial(_piece, is_quoted=True), most=2**15)
_WORD_HASHES = BoundedMemo(lambda chunk: packed(_WORD.findall(chunk)), most=2**17)
