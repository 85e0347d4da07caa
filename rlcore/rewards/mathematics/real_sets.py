"""Sets of real numbers (intervals, points, inequalities in one variable, unions), compared exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cmp_to_key
from typing import Any

import mpmath  # type: ignore[import-untyped]

from rlcore.rewards.mathematics.exact_values import equal_values, free_symbols
from rlcore.rewards.mathematics.formula import (
    Combined,
    Item,
    Items,
    Known,
    Named,
    Node,
    Relation,
    Span,
    Text,
    Value,
    negative,
    number,
)
from rlcore.rewards.mathematics.numeric_values import UndefinedError, evaluate

_PRECISION = 400
_FLIPPED = {"<": ">", ">": "<", "le": "ge", "ge": "le", "ne": "ne"}
_CLOSED = {"<": False, ">": False, "le": True, "ge": True}


@dataclass(frozen=True, slots=True)
class RealSet:
    """Set of real numbers, with the name of the variable that it contains, or ""."""

    name: str
    item: Item


def as_real_set(item: Item, *, is_reference: bool) -> RealSet | None:
    """Return the set of an interval, inequality, membership or union; None for anything else.

    For a reference, ``|x| < 2`` is a set for x too. An answer must be solved for its variable.
    """
    if isinstance(item, Named):
        inside = as_real_set(item.item, is_reference=is_reference)
        if inside is not None and not item.name:  # {x | x > 3}, with any letter
            return RealSet("", inside.item)
        return None if inside is None or inside.name not in ("", item.name) else RealSet(item.name, inside.item)
    if isinstance(item, Relation):
        return _of_relation(item, is_reference)
    if isinstance(item, Items) and item.kind == "list" and item.joined in ("and", "or"):
        return _joined(item, is_reference)
    is_set = isinstance(item, Span | Known | Combined) or (isinstance(item, Items) and item.kind == "set")
    return RealSet("", item) if is_set and _is_understood(item) else None


def equal_sets(reference: RealSet, answer: RealSet) -> bool:
    """Return True if two sets are equal, and name the same variable if both name one."""
    if reference.name and answer.name and reference.name != answer.name:
        return False
    ends = [*_ends(reference.item), *_ends(answer.item)]
    if any(map(free_symbols, ends)):
        pair = (reference.item, answer.item)
        return all(isinstance(item, Span) for item in pair) and _equal_spans(*pair)  # type: ignore[arg-type]
    cells = _Cells(ends)
    return cells.of(reference.item) == cells.of(answer.item)


def _of_relation(relation: Relation, is_reference: bool) -> RealSet | None:
    """Return the set of ``a < x <= b``, ``x > a``, ``x != a``: one side is the variable, the others are bounds."""
    operators, sides = relation.operators, relation.sides
    if not set(operators) <= set(_FLIPPED) or len(sides) > 3:
        return None
    index = 1 if len(sides) == 3 else int(_name_of(sides[0], is_reference) == "")
    name = _name_of(sides[index], is_reference)
    if not name or not _is_one_way(operators):
        return None
    item: Item = Known("reals")
    for where, operator in enumerate(operators):
        bound, sign = (sides[where], _FLIPPED[operator]) if where < index else (sides[where + 1], operator)
        if not isinstance(bound, Value | Text) or _name_of(bound, is_reference) == name:
            return None
        half = _half_line(bound, sign)
        if half is None:
            return None
        item = half if item == Known("reals") else Combined("&", item, half)
    return _without_bars(name, item) if name.startswith("|") else RealSet(name, _as_span(item))


def _is_one_way(operators: Sequence[str]) -> bool:
    ways = {"<" if operator in ("<", "le") else operator.replace("ge", ">") for operator in operators}
    return len(ways) == 1


def _half_line(bound: Item, sign: str) -> Item | None:
    node = _bound(bound)
    if node is None:
        is_below = isinstance(bound, Value) and bound.text.lstrip().startswith("-")
        return Known("reals") if sign == ("<" if not is_below else ">") else None  # x < infinity
    if sign == "ne":
        return Combined("-", Known("reals"), Items("set", (Value(node, ""),)))
    closed = _CLOSED[sign]
    return Span(None, node, False, closed) if sign in ("<", "le") else Span(node, None, closed, False)


def _as_span(item: Item) -> Item:
    if isinstance(item, Combined) and item.operation == "&":
        pair = (item.left, item.right)
        if all(isinstance(half, Span) for half in pair):
            low = next((half for half in pair if isinstance(half, Span) and half.low is not None), None)
            high = next((half for half in pair if isinstance(half, Span) and half.high is not None), None)
            if isinstance(low, Span) and isinstance(high, Span) and low is not high:
                return Span(low.low, high.high, low.low_closed, high.high_closed)
    return item


def _without_bars(name: str, item: Item) -> RealSet:
    inner = name.strip("|")
    positive = Combined("&", item, Span(number(0), None, True, False))
    return RealSet(inner, Combined("|", positive, _mirrored(positive)))


def _mirrored(item: Item) -> Item:
    if isinstance(item, Combined):
        return Combined(item.operation, _mirrored(item.left), _mirrored(item.right))
    if isinstance(item, Span):
        low, high = (None if end is None else negative(end) for end in (item.high, item.low))
        return Span(low, high, item.high_closed, item.low_closed)
    if isinstance(item, Items):
        return Items("set", tuple(Value(negative(one.node), "") for one in item.items if isinstance(one, Value)))
    return item


def _joined(item: Items, is_reference: bool) -> RealSet | None:
    found = [as_real_set(each, is_reference=is_reference) for each in item.items]
    if not all(isinstance(each, Relation | Named) for each in item.items) or any(each is None for each in found):
        return None
    sets = [each for each in found if each is not None]
    if len({each.name for each in sets}) != 1:
        return None
    whole = sets[0].item
    for each in sets[1:]:
        whole = Combined("|" if item.joined == "or" else "&", whole, each.item)
    return RealSet(sets[0].name, _as_span(whole))


def _name_of(item: Item, is_reference: bool) -> str:
    if isinstance(item, Text):
        return item.text if len(item.text) == 1 else ""
    if not isinstance(item, Value):
        return ""
    node = item.node
    if node.kind == "symbol":
        return str(node.value)
    if node.kind == "call" and str(node.value).endswith("()"):
        return item.text.replace(" ", "")
    is_bars = node.kind == "call" and node.value == "abs" and node.args[0].kind == "symbol"
    return f"|{node.args[0].value}|" if is_bars and is_reference else ""


def _bound(item: Item) -> Node | None:
    if isinstance(item, Text):
        return Node("symbol", item.text)
    assert isinstance(item, Value)
    return None if item.text.replace(" ", "").lstrip("+-") == "\\infty" else item.node


def _is_understood(item: Item) -> bool:
    if isinstance(item, Combined):
        return _is_understood(item.left) and _is_understood(item.right)
    if isinstance(item, Items):
        return item.kind == "set" and all(isinstance(each, Value) for each in item.items)
    return isinstance(item, Span | Known)


def _ends(item: Item) -> Iterator[Node]:
    if isinstance(item, Combined):
        yield from _ends(item.left)
        yield from _ends(item.right)
    elif isinstance(item, Span):
        yield from (end for end in (item.low, item.high) if end is not None)
    elif isinstance(item, Items):
        yield from (each.node for each in item.items if isinstance(each, Value))


def _equal_spans(reference: Span, answer: Span) -> bool:
    if (reference.low_closed, reference.high_closed) != (answer.low_closed, answer.high_closed):
        return False
    pairs = ((reference.low, answer.low), (reference.high, answer.high))
    return all(one is other if one is None or other is None else equal_values(one, other) for one, other in pairs)


class _Cells:
    """Real line, split at all ends into points and open intervals, in order."""

    def __init__(self, ends: Sequence[Node]) -> None:
        values = [(evaluate(end, {}, precision=_PRECISION, real=True), end) for end in ends]
        order: Callable[[tuple[Any, Node], tuple[Any, Node]], int] = lambda a, b: int(mpmath.sign(a[0] - b[0]))  # noqa: E731
        self._order: dict[Node, int] = {}
        index, previous = -1, None
        for _, end in sorted(values, key=cmp_to_key(order)):
            if previous is None or not equal_values(previous, end):
                index += 1
            self._order[end] = index
            previous = end
        self._count = index + 1

    def of(self, item: Item) -> list[bool]:
        """Return which cells a set contains: (-inf, e0), e0, (e0, e1), e1, ... (en, inf)."""
        cells = range(2 * self._count + 1)
        if isinstance(item, Combined):
            left, right = self.of(item.left), self.of(item.right)
            joined: dict[str, Callable[[bool, bool], bool]] = {
                "|": lambda a, b: a or b,
                "&": lambda a, b: a and b,
                "-": lambda a, b: a and not b,
            }
            return [joined[item.operation](a, b) for a, b in zip(left, right, strict=True)]
        if isinstance(item, Known):
            return [item.name == "reals"] * len(cells)
        if isinstance(item, Span):
            low = -1 if item.low is None else 2 * self._order[item.low] + 1
            high = len(cells) if item.high is None else 2 * self._order[item.high] + 1
            return [
                low < cell < high or (cell == low and item.low_closed) or (cell == high and item.high_closed)
                for cell in cells
            ]
        if isinstance(item, Items):
            points = {2 * self._order[each.node] + 1 for each in item.items if isinstance(each, Value)}
            return [cell in points for cell in cells]
        raise UndefinedError
