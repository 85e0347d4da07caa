r"""Units after a number: what may be dropped (``18 dollars``, ``5\text{ cm}^2``, ``90^\circ``) and what may not.

Words that change the value are no units. ``percent`` becomes a percent sign; ``million``, ``dozen`` and their like stay
what they are, so ``5 million`` is not 5.
"""

from __future__ import annotations

import re

from rlcore.rewards.plain_numbers import PlainNumber, parse_number

_SPACE = r"(?:[ ~]|\\[ ,;:!]){0,4}"
_STYLED = r"\\(?:text|textbf|textit|mathrm|mbox|operatorname)\{([^{}\\]{1,60})\}"
_UNIT = re.compile(
    rf"{_SPACE}(?:{_STYLED}|(?:\^ ?(?:\\circ|\{{ ?\\circ ?\}})|°)[CF]?|[€£]|(?<=[ ~,])([A-Za-z][A-Za-z /]{{1,60}}))"
    r"(?:\^(?:[23]|\{[23]\}))?"
)
_NUMBER_END = re.compile(r"[0-9}](?![0-9.,/}])")
_PERCENT_WORDS = re.compile(rf"{_SPACE}(?:\\text\{{ ?(?:percent|per cent) ?\}}|(?<= )(?:percent|per cent)(?![A-Za-z]))")
_WORD = re.compile(r"[A-Za-z]+")
# fmt: off - words, a line per kind
_SCALES = frozenset(
    (
        "hundred",
        "hundreds",
        "thousand",
        "thousands",
        "million",
        "millions",
        "billion",
        "billions",
        "trillion",
        "trillions",
        "dozen",
        "dozens",
        "score",
        "scores",
        "half",
        "halves",
        "third",
        "thirds",
        "fifths",
    )
)
_NO_UNITS = frozenset(
    (
        "and",
        "or",
        "to",
        "not",
        "no",
        "than",
        "more",
        "less",
        "least",
        "most",
        "fewer",
        "point",
        "minus",
        "plus",
        "times",
        "over",
        "by",
        "squared",
        "cubed",
        "mod",
        "divided",
    )
)
# fmt: on


def with_percent_sign(text: str) -> str:
    r"""``50 percent`` and ``50\text{ percent}`` as ``50\%``."""
    return _PERCENT_WORDS.sub(lambda _: r"\%", text)


def scale_words(text: str) -> list[str]:
    """The words in ``text`` that multiply a number, in the order of the alphabet."""
    return sorted(word for word in map(str.lower, _WORD.findall(text)) if word in _SCALES)


def parse_quantity(text: str) -> PlainNumber | None:
    r"""The plain number in a number with or without a unit; None for anything else. ``18 dollars`` is 18.

    A unit is one or more words of two letters or more behind a blank, anything short in ``\text{}``, a degree sign, a
    trailing currency sign. A single letter outside ``\text{}`` is a variable: ``5 x`` is no quantity. Words that
    multiply are read over too: the caller compares :func:`scale_words` first.
    """
    number = parse_number(text)
    if number is not None:
        return number
    for end in _NUMBER_END.finditer(text):
        unit = _UNIT.fullmatch(text, end.end())
        if unit is not None:
            words = set(map(str.lower, _WORD.findall(unit.group(1) or unit.group(2) or "")))
            return None if words & _NO_UNITS else parse_number(text[: end.end()])
    return None
