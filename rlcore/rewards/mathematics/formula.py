"""Formulas as trees, and kinds of answers: a value, a list, a tuple, an interval, a relation, a notation, words.

Notations are times of day, dates, ratios and numbers with a base: digits with signs that are not arithmetic.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from math import gcd


class FormulaError(ValueError):
    """Text that is not a formula of the grammar."""


@dataclass(frozen=True, slots=True)
class Node:
    """Node of a formula: ``number``, ``symbol``, ``constant``, ``add``, ``mul``, ``pow``, ``call`` or ``big``.

    ``value`` is the number, or the name of a symbol, constant, function or big operator.
    """

    kind: str
    value: Fraction | str = ""
    args: tuple[Node, ...] = ()


def number(value: int | Fraction) -> Node:
    """Return a number as a formula."""
    return Node("number", Fraction(value))


def add(*terms: Node) -> Node:
    """Return a sum."""
    return terms[0] if len(terms) == 1 else Node("add", "", terms)


def mul(*factors: Node) -> Node:
    """Return a product."""
    return factors[0] if len(factors) == 1 else Node("mul", "", factors)


def power(base: Node, exponent: Node) -> Node:
    """Return a power."""
    return Node("pow", "", (base, exponent))


def negative(node: Node) -> Node:
    """Return the negative; for a number a number."""
    return number(-Fraction(node.value)) if node.kind == "number" else mul(number(-1), node)


def difference(first: Node, second: Node) -> Node:
    """Return ``first - second``."""
    return add(first, negative(second))


def renamed(node: Node, old: str, new: str) -> Node:
    """Rename a variable of a formula."""
    value = new if node.kind == "symbol" and node.value == old else node.value
    return Node(node.kind, value, tuple(renamed(argument, old, new) for argument in node.args))


def walk(node: Node) -> list[Node]:
    """Return all nodes of a formula, top down."""
    found, open_nodes = [], [node]
    while open_nodes:
        found.append(open_nodes.pop())
        open_nodes.extend(found[-1].args)
    return found


@dataclass(frozen=True, slots=True)
class Value:
    """Formula, and True if it has a percent sign."""

    node: Node
    text: str
    is_percent: bool = False


@dataclass(frozen=True, slots=True)
class Text:
    """Item that is compared as text."""

    text: str


@dataclass(frozen=True, slots=True)
class Choice:
    """Choice ``(E) 12``: its letter and its content."""

    letter: str
    content: str


@dataclass(frozen=True, slots=True)
class Items:
    """Several items: ``list``, ``set``, ``tuple``, ``vector`` (in square brackets), or ``group`` (``x=1, y=2;``).

    ``joined`` is the ``and`` or ``or`` in a list.
    """

    kind: str
    items: tuple[Item, ...]
    joined: str = ""


@dataclass(frozen=True, slots=True)
class Span:
    """Interval; an end of None is infinite. ``pair`` is ``(a, b)`` as a tuple, which it may also mean."""

    low: Node | None
    high: Node | None
    low_closed: bool = False
    high_closed: bool = False
    pair: Items | None = None


@dataclass(frozen=True, slots=True)
class Combined:
    """Operation on sets: ``|`` union, ``&`` intersection, ``-`` difference."""

    operation: str
    left: Item
    right: Item


@dataclass(frozen=True, slots=True)
class Known:
    """``reals`` or ``empty``."""

    name: str


@dataclass(frozen=True, slots=True)
class Relation:
    """``a < b``, ``x^2 = y``, with ``operators`` between its ``sides``."""

    operators: tuple[str, ...]
    sides: tuple[Item, ...]


@dataclass(frozen=True, slots=True)
class Named:
    r"""Name with its item: ``x = 5``, ``(x,y) = (1,2)``, ``x \\in [1,2]``."""

    name: str
    item: Item


@dataclass(frozen=True, slots=True)
class Rounded:
    r"""Value with its approximation as written: ``\\frac56 \\approx 0.833``."""

    item: Item
    approximation: str


@dataclass(frozen=True, slots=True)
class Grid:
    """Matrix."""

    rows: tuple[tuple[Item, ...], ...]


_HALF = r" ?(?:\\text\{ ?)?([aApP])\.? ?[mM](?:\.|(?![A-Za-z]))(?: ?\})?"
_TIME = re.compile(rf"([0-9]{{1,2}}) ?: ?([0-5][0-9])(?: ?: ?([0-5][0-9]))?(?:{_HALF})?|([0-9]{{1,2}}){_HALF}")
_NAMED_TIMES = {"noon": ("12", "", "", "p"), "midnight": ("12", "", "", "a")}
_DATE = re.compile(
    r"([0-9]{4})[-/年]([0-9]{1,2})[-/月]([0-9]{1,2})日?|([0-9]{1,2})[/.]([0-9]{1,2})[/.]([0-9]{4}|[0-9]{2})"
)
_MONTHS = (
    "january february march april may june july august september october november december".split()  # noqa: SIM905
)
_MONTH = "|".join(f"{name[:3]}(?:{name[3:]})?" if len(name) > 3 else name for name in _MONTHS)
_DATE_WORDS = re.compile(
    rf"(?:({_MONTH})\.? ([0-9]{{1,2}})|([0-9]{{1,2}}) ({_MONTH}))(?:st|nd|rd|th)?(?:,? ([0-9]{{4}}))?", re.IGNORECASE
)
_RATIO = re.compile(r"[0-9.]{1,40}(?: ?(?::|(?<= )to(?= )) ?[0-9.]{1,40}){1,9}")
_BASED = re.compile(
    r"(?:\\text)?[({]? ?([0-9][0-9A-F]{0,200}(?:\.[0-9A-F]{1,200})?) ?[)}]? ?_ ?"
    r"(?:\{ ?(?:\\text\{ ?|\( ?)?([0-9]{1,2}|[a-z]+) ?[)}]?\}|([0-9]{1,2}))"
)
_RESIDUE = re.compile(
    r"(?:([A-Za-z]) ?\\equiv ?)?(-?[0-9]{1,20}(?: ?, ?-?[0-9]{1,20}){0,9}) ?"
    r"(?:\\pmod|\( ?(?:\\?mod|\\text\{ ?mod ?\})|(?<=[0-9 ])(?:\\?b?mod|\\text\{ ?mod ?\}))(?![a-z])"
    r" ?\{? ?([0-9]{1,20}) ?\}? ?\)?"
)
_BASES = {name: base for base, name in enumerate("two three four five six seven eight nine ten".split(), 2)}  # noqa: SIM905


@dataclass(frozen=True, slots=True)
class Notation:
    """``time``, ``date``, ``ratio``, ``based`` or ``residue``, with its parts."""

    kind: str
    parts: tuple[str | Fraction, ...]


def read_notation(text: str) -> Notation | None:
    """Parse a notation; None for anything else."""
    if text.lower() in _NAMED_TIMES:
        return Notation("time", _NAMED_TIMES[text.lower()])
    time = _TIME.fullmatch(text)
    if time is not None:
        parts = time.groups()[:4] if time.group(1) else (time.group(5), "", "", time.group(6))
        return Notation("time", tuple((part or "").lower().lstrip("0") for part in parts))
    date = _read_date(text)
    if date is not None:
        return date
    based = _BASED.fullmatch(text)
    if based is not None:
        base = _BASES.get(based.group(2) or "", based.group(2) or based.group(3))
        return Notation("based", (based.group(1).lstrip("0") or "0", str(base)))
    residue = _RESIDUE.fullmatch(text)
    if residue is not None and ("equiv" in text or "pmod" in text):
        name, values, modulus = residue.groups()
        if int(modulus) > 1:
            return Notation(
                "residue", (name or "", modulus, *sorted({str(int(v) % int(modulus)) for v in values.split(",")}))
            )
    if _RATIO.fullmatch(text):
        try:
            return Notation("ratio", tuple(Fraction(part.strip()) for part in re.split("to|:", text)))
        except ValueError:
            return None
    return None


def same_notation(reference: Notation, answer: Notation) -> bool:
    """Return True if both are equal; a ratio of integers must be in lowest terms or as in the reference."""
    if reference.kind != answer.kind:
        return False
    if reference.kind == "time":
        return _same_time(reference, answer)
    if reference.kind == "residue":
        is_named = reference.parts[0] and answer.parts[0] and reference.parts[0] != answer.parts[0]
        return not is_named and reference.parts[1:] == answer.parts[1:]
    if reference.kind != "ratio" or reference.parts == answer.parts:
        return reference.parts == answer.parts
    ours, theirs = _fractions(reference), _fractions(answer)
    if len(ours) != len(theirs) or not all(ours) or not all(theirs):
        return False
    is_lowest = all(part.denominator == 1 for part in theirs) and gcd(*map(int, theirs)) == 1
    return is_lowest and all(one * theirs[0] == other * ours[0] for one, other in zip(ours, theirs, strict=True))


def as_ratio(notation: Notation) -> tuple[Fraction, ...]:
    """Return the numbers of a time or a ratio; empty for anything else."""
    if notation.kind == "time" and not notation.parts[3]:
        return tuple(Fraction(str(part or 0)) for part in notation.parts[: 3 if notation.parts[2] else 2])
    return _fractions(notation) if notation.kind == "ratio" else ()


def _fractions(notation: Notation) -> tuple[Fraction, ...]:
    return tuple(Fraction(part) for part in notation.parts)


def _same_time(reference: Notation, answer: Notation) -> bool:
    """Return True if times agree: ``8:00`` is ``8:00 am``, ``20:00`` is ``8:00 pm``, ``8:00 am`` is not ``8:00 pm``."""
    if reference.parts[1:3] != answer.parts[1:3]:
        return False
    if (reference.parts[3] and answer.parts[3]) or reference.parts[0] == answer.parts[0]:
        return reference.parts[0] == answer.parts[0] and (
            reference.parts[3] == answer.parts[3] or not (reference.parts[3] and answer.parts[3])
        )
    hours = []
    for hour, *_, half in (reference.parts, answer.parts):
        whole = int(str(hour or 0))
        hours.append(whole if not half else whole % 12 + 12 * (half == "p"))
    return hours[0] == hours[1]


def _read_date(text: str) -> Notation | None:
    digits = _DATE.fullmatch(text)
    if digits is not None:
        found = [part.lstrip("0") for part in digits.groups() if part]
        return Notation("date", tuple(found) if digits.group(1) else ("given as", *found))
    words = _DATE_WORDS.fullmatch(text)
    if words is None:
        return None
    month, day = words.group(1) or words.group(4), words.group(2) or words.group(3)
    number = next(index for index, name in enumerate(_MONTHS, 1) if name.startswith(month.lower()[:3]))
    return Notation("date", (words.group(5) or "", str(number), day.lstrip("0")))


Item = Value | Text | Choice | Items | Span | Combined | Known | Relation | Named | Rounded | Grid | Notation


def bare(item: Item) -> Item:
    """Return an item without its name."""
    return item.item if isinstance(item, Named) else item
