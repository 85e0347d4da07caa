"""What an answer can be: a value, a list, a tuple, an interval, a relation, words."""

from __future__ import annotations

from dataclasses import dataclass

from rlcore.rewards.mathematics.formula import Node
from rlcore.rewards.mathematics.notations import Notation


@dataclass(frozen=True, slots=True)
class Value:
    """A formula, and whether it has a percent sign."""

    node: Node
    text: str
    is_percent: bool = False


@dataclass(frozen=True, slots=True)
class Text:
    """Something that is compared as text."""

    text: str


@dataclass(frozen=True, slots=True)
class Choice:
    """``(E) 12``: the letter of a choice, and what it says."""

    letter: str
    says: str


@dataclass(frozen=True, slots=True)
class Items:
    """Several: a ``list``, a ``set``, a ``tuple``, a ``vector`` (in square brackets), a ``group`` (``x=1, y=2;``).

    ``joined``: a list with ``and`` or ``or`` in it.
    """

    kind: str
    items: tuple[Item, ...]
    joined: str = ""


@dataclass(frozen=True, slots=True)
class Span:
    """An interval; an end of None is infinite. ``is_pair``: ``(a, b)``, which may be a pair as well."""

    low: Node | None
    high: Node | None
    low_closed: bool = False
    high_closed: bool = False
    pair: Items | None = None


@dataclass(frozen=True, slots=True)
class Combined:
    """Sets and what is done with them: ``|`` union, ``&`` intersection, ``-`` difference."""

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
    """``x = 5``, ``(x,y) = (1,2)``, ``x \\in [1,2]``: the name, and what it is."""

    name: str
    item: Item


@dataclass(frozen=True, slots=True)
class Rounded:
    """``\\frac56 \\approx 0.833``: a value and its approximation as it is written."""

    item: Item
    approximation: str


@dataclass(frozen=True, slots=True)
class Grid:
    """A matrix."""

    rows: tuple[tuple[Item, ...], ...]


Item = Value | Text | Choice | Items | Span | Combined | Known | Relation | Named | Rounded | Grid | Notation
