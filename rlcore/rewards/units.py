r"""Units after a number: what may be dropped (``18 dollars``, ``5\text{ cm}^2``, ``90^\circ``) and what may not.

Words that change the value are no units. ``percent`` becomes a percent sign; ``million``, ``dozen`` and their like
multiply, so ``5 million`` is 5000000 and not 5; ``half`` and ``third`` stay what they are.
"""

from __future__ import annotations

import re
from dataclasses import replace

from rlcore.rewards.plain_numbers import PlainNumber, parse_number

_SPACE = r"(?:[ ~]|\\[ ,;:!]){0,4}"
_STYLED = r"\\(?:text|textbf|textit|mathrm|mbox|operatorname)\{([^{}\\]{1,60})\}"
_UNIT = re.compile(
    rf"{_SPACE}(?:{_STYLED}|(?:\^ ?(?:\\circ|\{{ ?\\circ ?\}})|°)[CF]?|[€£¥₹₩₽¢]|\\?\$"
    r"|(?<=[ ~,])([A-Za-z][A-Za-z /]{1,60}))(?:\^(?:[23]|\{[23]\}))?"
)
_NUMBER_END = re.compile(r"[0-9}](?![0-9.,/}])")
_PERCENT_WORDS = re.compile(rf"{_SPACE}(?:\\text\{{ ?(?:percent|per cent) ?\}}|(?<= )(?:percent|per cent)(?![A-Za-z]))")
_WORD = re.compile(r"[A-Za-z]+")
_ONE_OF = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
_MULTIPLES = _ONE_OF | {f"{word}s": size for word, size in _ONE_OF.items()}
_SCALES = frozenset((*_MULTIPLES, "score", "scores", "half", "halves", "third", "thirds", "fifths"))
_NO_UNIT = re.compile(
    r"\b(?:and|or|nor|but|to|not|no|than|more|less|least|most|fewer|point|minus|plus|times|over|by|squared|cubed|mod"
    r"|divided|if|unless|except|wrong|incorrect|false)\b"
)


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
    multiply stand before the unit, ``1.8 billion dollars``.
    """
    number = parse_number(text)
    if number is not None:
        return number
    for end in _NUMBER_END.finditer(text):
        unit = _UNIT.fullmatch(text, end.end())
        if unit is not None:
            return _in_units(text[: end.end()], (unit.group(1) or unit.group(2) or "").lower())
    return None


def _in_units(written: str, unit: str) -> PlainNumber | None:
    """A number and what stands behind it: words that multiply come first, then those of the unit."""
    number, words = parse_number(written), _WORD.findall(unit)
    if number is None or _NO_UNIT.search(unit) or (number.is_percent and _SCALES & set(words)):
        return None
    while words and words[0] in _MULTIPLES:
        number = replace(number, value=number.value * _MULTIPLES[words.pop(0)])
    return None if _SCALES & set(words) else number
