"""Formulas as trees."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction


class FormulaError(ValueError):
    """A text that is no formula of the grammar."""


@dataclass(frozen=True, slots=True)
class Node:
    """A node of a formula: ``number``, ``symbol``, ``constant``, ``add``, ``mul``, ``pow``, ``call`` or ``big``.

    ``value``: the number, or the name of a symbol, constant, function or big operator.
    """

    kind: str
    value: Fraction | str = ""
    args: tuple[Node, ...] = ()


def number(value: int | Fraction) -> Node:
    """A number as a formula."""
    return Node("number", Fraction(value))


def add(*terms: Node) -> Node:
    """A sum."""
    return terms[0] if len(terms) == 1 else Node("add", "", terms)


def mul(*factors: Node) -> Node:
    """A product."""
    return factors[0] if len(factors) == 1 else Node("mul", "", factors)


def power(base: Node, exponent: Node) -> Node:
    """A power."""
    return Node("pow", "", (base, exponent))


def negative(node: Node) -> Node:
    """The negative; of a number it is a number."""
    return number(-Fraction(node.value)) if node.kind == "number" else mul(number(-1), node)


def difference(first: Node, second: Node) -> Node:
    """``first - second``."""
    return add(first, negative(second))


def renamed(node: Node, old: str, new: str) -> Node:
    """A formula with another name for a variable."""
    value = new if node.kind == "symbol" and node.value == old else node.value
    return Node(node.kind, value, tuple(renamed(argument, old, new) for argument in node.args))


def walk(node: Node) -> list[Node]:
    """All nodes of a formula, from the top."""
    found, open_nodes = [], [node]
    while open_nodes:
        found.append(open_nodes.pop())
        open_nodes.extend(found[-1].args)
    return found
