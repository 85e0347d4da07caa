"""Exact plain numbers: integers, decimals, ``1e3``, fractions, percentages. No floats, no sympy."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from fractions import Fraction

_DIGITS = r"[0-9]{1,200}"
_DECIMAL = rf"(?:{_DIGITS}(?:\.[0-9]{{0,200}})?|\.{_DIGITS})"
_PLAIN = re.compile(rf"([-+]?){_DECIMAL}(?:[eE][-+]?[0-9]{{1,2}})?")
_SLASH = re.compile(rf"([-+]?) ?({_DECIMAL}) ?/ ?([-+]?{_DECIMAL})")
_FRAC = re.compile(rf"([-+]?) ?\\[cdt]?frac ?\{{ ?([-+]?{_DECIMAL}) ?\}} ?\{{ ?([-+]?{_DECIMAL}) ?\}}")
_SHORT_FRAC = re.compile(r"([-+]?) ?\\[dt]?frac ?([0-9]) ?([0-9])")
_MIXED = re.compile(
    rf"([-+]?) ?({_DIGITS}) ?(?:(?<= )({_DIGITS})/({_DIGITS})|\\[dt]?frac ?\{{({_DIGITS})\}} ?\{{({_DIGITS})\}}"
    r"|\\[dt]?frac ?([0-9]) ?([0-9]))"
)
_SCIENTIFIC = re.compile(
    rf"([-+]?{_DECIMAL}) ?(?:\\times|\\cdot|×|\*) ?10 ?(?:\^|\*\*) ?"
    r"(?:\{ ?([-+]?[0-9]{1,2}) ?\}|([-+]?[0-9]{1,2}))"
)
_TEN = re.compile(r"([-+]?) ?10 ?(?:\^|\*\*) ?(?:\{ ?([-+]?[0-9]{1,2}) ?\}|([-+]?[0-9]{1,2}))")
_REPEATING = re.compile(
    r"([-+]?)([0-9]{0,200})\.([0-9]{0,200})"
    r"(?:\\(?:overline|bar) ?\{([0-9]{1,200})\}|(\\dot ?\{?[0-9]\}?(?:[0-9]{0,40}\\dot ?\{?[0-9]\}?)?))"
)
_GROUPED = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:(?:,\\! ?|,|\{,\}|\\,)[0-9]{3}){1,60}(?![0-9,])")
_SEPARATOR = re.compile(r"\{,\}|\\,|,\\! ?|,")
_PERCENT = re.compile(r" ?\\?%$")
# US$18, $18, ¥3, EUR 5, Rs. 40
_CURRENCY = re.compile(
    r"^([-+]?) ?(?:(?:US|USD|CA|C|AU|A|NZ|HK|S|R)?\\?\$|[€£¥₹₩₽]|(?:USD|EUR|GBP|CHF|JPY|CNY|INR|CAD|AUD)(?= )|Rs\.?) ?"
    r"(?=[0-9.])"
)


@dataclass(frozen=True, slots=True)
class PlainNumber:
    """Number with its percent sign: ``50%`` is ``value=50, is_percent=True``.

    Two plain numbers are equal if value *and* percent sign are: 50% is neither 0.5 nor 50. ``is_evaluated`` is False
    for an open division (``6/2``, ``2/4``), and is ignored by equality.
    """

    value: Fraction
    is_percent: bool
    is_evaluated: bool = field(compare=False)


def parse_number(text: str) -> PlainNumber | None:
    r"""Parse a plain number exactly; None for anything else, also for a fraction over zero.

    Accepted: ``-3``, ``1,234.50``, ``1{,}234``, ``.5``, ``1e3``, ``2 \times 10^3``, ``10^3``, ``3/4``, ``\frac{3}{4}``,
    ``\frac34``, ``50%``, ``$18``, ``US$18``, the mixed numbers ``1 1/2`` and ``1\frac{1}{2}``, and repeating decimals,
    ``0.1\overline{6}``.

    Digits are ASCII. An exponent has at most 2 digits and a number at most 200, which bounds the time.
    """
    written = text.strip().replace("−", "-")
    percent = _PERCENT.search(written)
    written = _PERCENT.sub("", written) if percent else _CURRENCY.sub(r"\1", written)
    return _read(_GROUPED.sub(lambda match: _SEPARATOR.sub("", match.group()), written), percent is not None)


def _read(text: str, is_percent: bool) -> PlainNumber | None:
    if _PLAIN.fullmatch(text):
        return PlainNumber(Fraction(text), is_percent, True)
    compound = next((value for read in _COMPOUND if (value := read(text)) is not None), None)
    if compound is not None:
        return PlainNumber(compound, is_percent, True)
    match = _SLASH.fullmatch(text) or _FRAC.fullmatch(text) or _SHORT_FRAC.fullmatch(text)
    if match is None:
        return None
    sign = -1 if match.group(1) == "-" else 1
    above, below = Fraction(match.group(2)), Fraction(match.group(3))
    if below == 0:
        return None
    whole = above.denominator == below.denominator == 1 and abs(below) > 1
    is_reduced = whole and math.gcd(above.numerator, below.numerator) == 1
    return PlainNumber(sign * above / below, is_percent, is_reduced)


def _mixed(text: str) -> Fraction | None:
    """Parse ``1 1/2`` as 3/2; None if the fraction is not below one (``1 3/2``), which may be two numbers."""
    match = _MIXED.fullmatch(text)
    if match is None:
        return None
    whole, above, below = (int(group) for group in match.groups()[1:] if group is not None)
    if not 0 < above < below:
        return None
    return (-1 if match.group(1) == "-" else 1) * (whole + Fraction(above, below))


def _scientific(text: str) -> Fraction | None:
    r"""Parse ``1.5 \times 10^{3}`` as 1500."""
    match = _SCIENTIFIC.fullmatch(text)
    return None if match is None else Fraction(match.group(1)) * Fraction(10) ** int(match.group(2) or match.group(3))


def _power_of_ten(text: str) -> Fraction | None:
    """Parse ``10^{3}`` as 1000."""
    match = _TEN.fullmatch(text)
    if match is None:
        return None
    return (-1 if match.group(1) == "-" else 1) * Fraction(10) ** int(match.group(2) or match.group(3))


def _repeating(text: str) -> Fraction | None:
    r"""Parse ``0.1\overline{6}``, or ``0.1\dot{6}``, as 1/10 + 6/90 = 1/6."""
    match = _REPEATING.fullmatch(text)
    if match is None:
        return None
    sign, whole, fixed, *periods = match.groups()
    period = re.sub("[^0-9]", "", next(filter(None, periods)))
    start = Fraction(int(whole + fixed or "0"), 10 ** len(fixed))
    tail = Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(fixed))
    return (-1 if sign == "-" else 1) * (start + tail)


_COMPOUND = (_mixed, _repeating, _scientific, _power_of_ten)
