"""Splitting of formulas by their brackets, and their spelling for comparison."""

from __future__ import annotations

import re


def split_top(text: str, pattern: re.Pattern[str]) -> tuple[list[str], list[str]]:
    """Split ``text`` at matches of ``pattern`` outside of brackets; return the parts and the matches."""
    parts, found, depth, start, index = [], [], 0, 0, 0
    while index < len(text):
        match = pattern.match(text, index) if depth == 0 else None
        if match is not None and match.end() > index:
            parts.append(text[start:index])
            found.append(match.group())
            start = index = match.end()
            continue
        if (character := text[index]) == "\\" and text[index + 1 : index + 2] not in "{}":
            index += 2
            continue
        depth = max(depth + (character in "([{") - (character in ")]}"), 0)
        index += 1
    return [*parts, text[start:]], found


def is_prose(part: str) -> bool:
    """Return True if a part of a list has many words."""
    return len(re.findall(r"[A-Za-z]{2,}", re.sub(r"\\[A-Za-z]+", " ", part))) > 6


def encloses(text: str) -> bool:
    """Return True if the bracket at the start closes at the end."""
    depth = 0
    for index, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth == 0:
            return index == len(text) - 1
    return False


def key(text: str) -> str:
    """Return a text for comparison: words case-folded, formulas without blanks."""
    text = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text)
    is_prose = re.search(r"[A-Za-z]{3,}", re.sub(r"\\[A-Za-z]+", "", text)) is not None
    text = re.sub(r"\{([A-Za-z0-9+*-])\}", r"\1", text).replace("\\mid", "|")
    return re.sub(r"[\s.]+", "", text.casefold() if is_prose else text)
