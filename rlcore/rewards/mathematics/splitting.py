"""Splitting of formulas by their brackets, and their spelling for comparison."""

from __future__ import annotations

import re


def split_top(text: str, pattern: re.Pattern[str]) -> tuple[list[str], list[str]]:
    """Split ``text`` at matches of ``pattern`` outside of brackets; return the parts and the matches."""
    parts, found, depth, start, place = [], [], 0, 0, 0
    while place < len(text):
        match = pattern.match(text, place) if depth == 0 else None
        if match is not None and match.end() > place:
            parts.append(text[start:place])
            found.append(match.group())
            start = place = match.end()
            continue
        if (character := text[place]) == "\\" and text[place + 1 : place + 2] not in "{}":
            place += 2
            continue
        depth = max(depth + (character in "([{") - (character in ")]}"), 0)
        place += 1
    return [*parts, text[start:]], found


def is_prose(part: str) -> bool:
    """Return True if a part of a list has many words."""
    return len(re.findall(r"[A-Za-z]{2,}", re.sub(r"\\[A-Za-z]+", " ", part))) > 6


def encloses(text: str) -> bool:
    """Return True if the bracket at the start closes at the end."""
    depth = 0
    for place, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth == 0:
            return place == len(text) - 1
    return False


def key(text: str) -> str:
    """Return a text for comparison: words case-folded, formulas without blanks."""
    text = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text)
    is_prose = re.search(r"[A-Za-z]{3,}", re.sub(r"\\[A-Za-z]+", "", text)) is not None
    text = re.sub(r"\{([A-Za-z0-9+*-])\}", r"\1", text).replace("\\mid", "|")
    return re.sub(r"[\s.]+", "", text.casefold() if is_prose else text)
