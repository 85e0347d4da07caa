"""Equality of equations and inequalities that are not sets of numbers."""

from __future__ import annotations

from fractions import Fraction

from rlcore.rewards.mathematics.exact_values import equal_values, free_symbols
from rlcore.rewards.mathematics.formula import FormulaError, Node, difference, mul, number
from rlcore.rewards.mathematics.lists import Equal, equal_in_order
from rlcore.rewards.mathematics.numeric_values import exact_rational
from rlcore.rewards.mathematics.reader import parse_formula
from rlcore.rewards.mathematics.structures import Named, Relation, Value

_MIRRORED = {"<": ">", ">": "<", "le": "ge", "ge": "le", "=": "=", "ne": "ne"}


def equal_relations(equals: Equal, reference: Relation, answer: Relation) -> bool:
    """Return True for equal chains, read in either direction, with differences of sides equal up to a constant."""
    if reference.operators != answer.operators or reference.operators[0] in "<leg>":
        mirrored = Relation(tuple(_MIRRORED[one] for one in answer.operators[::-1]), answer.sides[::-1])
        answer = mirrored if answer.operators != reference.operators else answer
    if reference.operators != answer.operators:
        return False
    if len(reference.sides) > 2:
        return equal_in_order(equals, reference.sides, answer.sides)
    sides = [*reference.sides, *answer.sides]
    if not all(isinstance(side, Value) for side in sides):
        return equal_in_order(equals, reference.sides, answer.sides) or (
            reference.operators[0] in ("=", "ne") and equal_in_order(equals, reference.sides, answer.sides[::-1])
        )
    nodes = [side.node for side in sides if isinstance(side, Value)]
    if not free_symbols(difference(*nodes[:2])) or equal_values(nodes[0], nodes[1]):
        return nodes[:2] == nodes[2:]  # without a variable, all true equations would be equal
    return _proportional(difference(*nodes[:2]), difference(*nodes[2:]), reference.operators[0])


def _proportional(first: Node, second: Node, operator: str) -> bool:
    """Return True if two differences are equal up to a constant factor, which is positive for an inequality."""
    if equal_values(first, second):
        return True
    point = {name: Fraction(7 * index + 3, 5) for index, name in enumerate(sorted(free_symbols(first)), 2)}
    if free_symbols(first) != free_symbols(second):
        return False
    ratio = _ratio_at(first, second, point)
    if ratio is None or (operator not in ("=", "ne") and ratio < 0):
        return False
    return equal_values(first, mul(number(ratio), second))


def _ratio_at(first: Node, second: Node, point: dict[str, Fraction]) -> Fraction | None:
    """Return the ratio of two rational functions at a point."""
    values = []
    for node in (first, second):
        value = exact_rational(_placed(node, point))
        if value is None:
            return None
        values.append(value)
    return values[0] / values[1] if values[0] and values[1] else None


def _placed(node: Node, point: dict[str, Fraction]) -> Node:
    if node.kind == "symbol":
        return number(point[str(node.value)])
    if node.kind == "big":
        return node
    return Node(node.kind, node.value, tuple(_placed(argument, point) for argument in node.args))


def as_relation(named: Named) -> Relation | None:
    """Return ``y = 2x`` as an equation; None if the name is not a formula."""
    try:
        left = Value(parse_formula(named.name), named.name)
    except FormulaError:
        return None
    return Relation(("=",), (left, named.item))
