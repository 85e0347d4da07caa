"""Formulas as trees."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction


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
