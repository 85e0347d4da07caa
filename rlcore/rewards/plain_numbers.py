r"""Plain numbers, read exactly: integers, decimals, ``1e3``, fractions, percentages. No floats, no sympy."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

_DIGITS = r"[0-9]{1,200}"
_DECIMAL = rf"(?:{_DIGITS}(?:\.[0-9]{{0,200}})?|\.{_DIGITS})"
_PLAIN = re.compile(rf"([-+]?){_DECIMAL}(?:[eE][-+]?[0-9]{{1,2}})?")
_SLASH = re.compile(rf"([-+]?) ?({_DECIMAL}) ?/ ?([-+]?{_DECIMAL})")
_FRAC = re.compile(rf"([-+]?) ?\\[dt]?frac ?\{{ ?([-+]?{_DECIMAL}) ?\}} ?\{{ ?([-+]?{_DECIMAL}) ?\}}")
_SHORT_FRAC = re.compile(r"([-+]?) ?\\[dt]?frac ?([0-9]) ?([0-9])")
_GROUPED = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:(?:,|\{,\}|\\,|,\\!)[0-9]{3}){1,60}(?![0-9,])")
_SEPARATOR = re.compile(r"\{,\}|\\,|,\\!|,")
_PERCENT = re.compile(r" ?\\?%$")
_CURRENCY = re.compile(r"^([-+]?) ?\\?[$€£] ?(?=[0-9.])")


@dataclass(frozen=True, slots=True)
class PlainNumber:
    """A number and whether it was written with a percent sign: ``50%`` is ``PlainNumber(Fraction(50), True)``.

    Two plain numbers are equal when value *and* sign of percentage are: 50% is neither 0.5 nor 50.
    """

    value: Fraction
    is_percent: bool = False


def parse_number(text: str) -> PlainNumber | None:
    r"""Read a plain number exactly; None for anything else (also for a fraction over zero).

    Read: ``-3``, ``1,234.50``, ``1{,}234``, ``.5``, ``1e3``, ``3/4``, ``\frac{3}{4}``, ``\frac34``, ``50%``, ``$18``.
    Digits are ASCII; an exponent has at most two digits and a number at most 200, so reading is always quick.
    """
    written = text.strip().replace("−", "-")
    if not written.isascii() and _CURRENCY.match(written) is None:
        return None
    percent = _PERCENT.search(written)
    written = _PERCENT.sub("", written) if percent else _CURRENCY.sub(r"\1", written)
    value = _read(_GROUPED.sub(lambda match: _SEPARATOR.sub("", match.group()), written))
    return None if value is None else PlainNumber(value, percent is not None)


def _read(text: str) -> Fraction | None:
    if _PLAIN.fullmatch(text):
        return Fraction(text)
    match = _SLASH.fullmatch(text) or _FRAC.fullmatch(text) or _SHORT_FRAC.fullmatch(text)
    if match is None:
        return None
    sign, numerator, denominator = match.groups()
    below = Fraction(denominator)
    if below == 0:
        return None
    return (-1 if sign == "-" else 1) * Fraction(numerator) / below
