"""Formulas as trees, and kinds of answers: a value, a list, a tuple, an interval, a relation, words."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from rlcore.rewards.mathematics.notations import Notation


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


Item = Value | Text | Choice | Items | Span | Combined | Known | Relation | Named | Rounded | Grid | Notation
