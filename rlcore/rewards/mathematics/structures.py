"""Kinds of answers: a value, a list, a tuple, an interval, a relation, words."""

from __future__ import annotations

from dataclasses import dataclass

from rlcore.rewards.mathematics.formula import Node
from rlcore.rewards.mathematics.notations import Notation


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


Item = Value | Text | Choice | Items | Span | Combined | Known | Relation | Named | Rounded | Grid | Notation
