"""Equality of an answer and a reference by kind: a value with a value, a list with a list."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

import mpmath  # type: ignore[import-untyped]

from rlcore.rewards.mathematics.exact_values import equal_values, free_symbols
from rlcore.rewards.mathematics.formula import (
    Choice,
    Combined,
    FormulaError,
    Grid,
    Item,
    Items,
    Named,
    Node,
    Notation,
    Relation,
    Rounded,
    Span,
    Text,
    Value,
    as_ratio,
    bare,
    difference,
    mul,
    number,
    renamed,
    same_notation,
)
from rlcore.rewards.mathematics.numeric_values import UndefinedError, evaluate, exact_rational
from rlcore.rewards.mathematics.reader import parse_formula
from rlcore.rewards.mathematics.reading import read
from rlcore.rewards.mathematics.real_sets import as_real_set, equal_sets
from rlcore.rewards.units import parse_quantity, same_magnitude

_CHOICES = frozenset("ABCDEFGHIJ")
_DECIMAL = re.compile(r"-?[0-9]*\.?[0-9]+")


def equals(reference: Item, answer: Item) -> bool:
    """Return True if an answer states what the reference does.

    Raises:
        UndefinedError: A value does not exist.
    """
    if isinstance(answer, Rounded):
        return _equals_rounded(reference, answer)
    if isinstance(reference, Rounded):
        return equals(reference.item, answer)
    if isinstance(reference, Choice):
        return _equals_choice(reference, answer, is_reference=True)
    if isinstance(answer, Choice):
        return _equals_choice(answer, reference, is_reference=False)
    if isinstance(reference, Notation) or isinstance(answer, Notation):
        return _equals_notation(reference, answer)
    return _equals_collection(reference, answer)


def _equals_collection(reference: Item, answer: Item) -> bool:
    if isinstance(reference, Items) and reference.kind == "group":
        inside = Items("list", answer.items) if isinstance(answer, Items) and answer.kind == "group" else answer
        return _equal_by_name(Items("list", reference.items), inside)
    if isinstance(reference, Items) and reference.kind == "list" and not _are_joined_relations(reference):
        return _equal_lists(reference, answer)
    sets = [as_real_set(reference, is_reference=True), as_real_set(answer, is_reference=False)]
    are_tuples = all(map(_is_pair, (reference, answer))) or all(map(_is_points, (reference, answer)))
    if sets[0] is not None and sets[1] is not None and not are_tuples:
        return equal_sets(sets[0], sets[1])
    if isinstance(answer, Relation) and as_real_set(reference, is_reference=False) is not None:
        return False  # not solved for the variable
    if isinstance(reference, Named) or isinstance(answer, Named):
        return _equals_named(reference, answer)
    return _equals_plain(reference, answer)


def _equals_plain(reference: Item, answer: Item) -> bool:
    reference, answer = _as_grid(_as_pair(reference)), _as_grid(_as_pair(answer))
    if isinstance(reference, Grid) and isinstance(answer, Items):
        reference = _as_row(reference, answer.kind)
    elif isinstance(answer, Grid) and isinstance(reference, Items):
        answer = _as_row(answer, reference.kind)
    if isinstance(reference, Items) and reference.kind == "tuple":
        answer = _values_by_name(answer)
    if isinstance(reference, Text) or isinstance(answer, Text):
        return _equals_text(reference, answer)
    if isinstance(reference, Value) and isinstance(answer, Value):
        is_alike = reference.is_percent == answer.is_percent and same_magnitude(answer.text, reference.text)
        return is_alike and equal_values(reference.node, _with_constant(answer.node, reference.node))
    if isinstance(reference, Items) and isinstance(answer, Items):
        return _equal_items(reference, answer)
    if isinstance(reference, Grid) and isinstance(answer, Grid):
        return len(reference.rows) == len(answer.rows) and all(
            _equal_in_order(ours, theirs) for ours, theirs in zip(reference.rows, answer.rows, strict=True)
        )
    if isinstance(reference, Relation) and isinstance(answer, Relation):
        return _equal_relations(reference, answer)
    if isinstance(reference, Combined) and isinstance(answer, Combined):
        pairs = ((reference.left, answer.left), (reference.right, answer.right))
        crossed = ((reference.left, answer.right), (reference.right, answer.left))
        orders = (pairs,) if reference.operation == "-" else (pairs, crossed)
        return reference.operation == answer.operation and any(all(equals(*pair) for pair in order) for order in orders)
    return reference == answer


def _as_grid(item: Item) -> Item:
    rows = [_as_pair(row) for row in item.items] if isinstance(item, Items) and item.kind == "vector" else []
    rows = [row for row in rows if isinstance(row, Items) and row.kind == "vector"]
    is_grid = isinstance(item, Items) and len(rows) == len(item.items) > 0
    return Grid(tuple(row.items for row in rows if isinstance(row, Items))) if is_grid else item


def _as_row(grid: Grid, kind: str) -> Item:
    is_one = min(len(grid.rows), max(map(len, grid.rows), default=0)) == 1 and kind in ("tuple", "vector")
    return Items(kind, tuple(cell for row in grid.rows for cell in row)) if is_one else grid


def _with_constant(answer: Node, reference: Node) -> Node:
    """Rename the answer's constant of integration like the reference's: ``C`` for ``c``."""
    ours, theirs = free_symbols(reference), free_symbols(answer)
    return renamed(answer, "c", "C") if "C" in ours - theirs and "c" in theirs - ours else answer


def _equals_text(reference: Item, answer: Item) -> bool:
    if isinstance(reference, Text) and isinstance(answer, Text):
        is_one = len(reference.text) == len(answer.text) == 1 and reference.text in _CHOICES
        return reference.text == answer.text or (is_one and reference.text == answer.text.upper())
    if isinstance(reference, Text) and isinstance(answer, Value) and len(reference.text) == 1:
        return answer.text.upper() == reference.text and reference.text in _CHOICES  # a lower-case choice
    text, other = (reference, answer) if isinstance(reference, Text) else (answer, reference)
    if isinstance(text, Text) and isinstance(other, Items) and other.kind == "list":
        letters = [_letter_of(item) for item in other.items]
        return len(letters) > 1 and all(letters) and "".join(letters) == text.text
    return False


def _equals_choice(choice: Choice, other: Item, *, is_reference: bool) -> bool:
    """Compare by the letter, or by the choice's content if the other item has no letter."""
    if isinstance(other, Choice):
        is_same = not (choice.content and other.content) or equals(
            read(choice.content, is_reference=True), read(other.content)
        )
        return choice.letter == other.letter and is_same
    if isinstance(other, Text) and len(other.text) == 1:
        return choice.letter == other.text.upper()
    return is_reference and bool(choice.content) and equals(read(choice.content, is_reference=True), other)


def _equals_notation(reference: Item, answer: Item) -> bool:
    if isinstance(answer, Named) and not isinstance(reference, Named):
        answer = answer.item
    if isinstance(reference, Named):
        reference = reference.item
        answer = answer.item if isinstance(answer, Named) else answer
    if isinstance(reference, Notation) and isinstance(answer, Notation):
        return same_notation(reference, answer)
    for notation, other in ((reference, answer), (answer, reference)):
        if isinstance(notation, Notation) and isinstance(other, Value) and len(parts := as_ratio(notation)) == 2:
            value = exact_rational(other.node)
            is_spelled = notation.kind == "ratio" or re.findall("[0-9]+", other.text) == [str(part) for part in parts]
            return is_spelled and parts[1] != 0 and value == parts[0] / parts[1]
    return False


def _equals_rounded(reference: Item, answer: Rounded) -> bool:
    """Accept a value with its rounding as either, if they agree."""
    value = bare(answer.item)
    quantity, digits = parse_quantity(answer.approximation), _DECIMAL.search(answer.approximation)
    if not isinstance(value, Value) or quantity is None or quantity.is_percent or digits is None:
        return False
    try:
        exact = evaluate(value.node, {}, precision=400, real=True)
    except (UndefinedError, KeyError):
        return False
    num_decimals, rounded = len(digits.group().partition(".")[2]), quantity.value
    error = mpmath.fabs(exact - mpmath.mpf(rounded.numerator) / rounded.denominator)
    if error * 2 * 10**num_decimals > 1.0001:
        return False
    return equals(reference, answer.item) or equals(reference, Value(number(rounded), answer.approximation))


def _equals_named(reference: Item, answer: Item) -> bool:
    """Accept ``x = 5`` for 5 and 5 for ``x = 5``, but neither ``y = 5`` for ``x = 5`` nor ``x = x + 1`` for x + 1."""
    if isinstance(reference, Named) and isinstance(answer, Named):
        ours, theirs = _tuple_names(reference.name), _tuple_names(answer.name)
        is_same = reference.name == answer.name
        return (is_same or bool(ours and ours == theirs)) and equals(reference.item, answer.item)
    if isinstance(answer, Named):
        return _equals_unnamed(reference, answer)
    assert isinstance(reference, Named)
    if isinstance(answer, Relation):
        return _equals_named_relation(reference, answer)
    if names := _tuple_names(reference.name):
        inside = _as_pair(reference.item)
        if isinstance(answer, Items) and answer.kind == "list" and isinstance(inside, Items):
            named = tuple(Named(name, item) for name, item in zip(names, inside.items, strict=False))
            return len(names) == len(inside.items) and _equal_by_name(Items("list", named), answer)
    return equals(reference.item, answer)


def _equals_named_relation(reference: Named, answer: Relation) -> bool:
    """Accept ``5 = x`` for ``x = 5``; if the value has variables, ``2x - y = 3`` for ``y = 2x - 3``."""
    if answer.operators != ("=",):
        return False
    left, right = answer.sides
    if isinstance(right, Value) and right.text.replace(" ", "") == reference.name:
        return equals(reference.item, left)
    ours = _as_relation(reference)
    has_variables = isinstance(reference.item, Value) and free_symbols(reference.item.node)
    return bool(has_variables) and ours is not None and _equal_relations(ours, answer)


def _equals_unnamed(reference: Item, answer: Named) -> bool:
    if isinstance(reference, Relation):
        ours = _as_relation(answer)
        return ours is not None and _equal_relations(reference, ours)
    if isinstance(reference, Text) and {reference.text, answer.name} <= _CHOICES:
        return False  # B = A
    used = free_symbols(answer.item.node) if isinstance(answer.item, Value) else frozenset()
    return answer.name not in used and equals(reference, answer.item)


def _is_pair(item: Item) -> bool:
    return (isinstance(item, Items) and item.kind != "list") or (isinstance(item, Span) and item.pair is not None)


def _is_points(item: Item) -> bool:
    return isinstance(item, Items) or (isinstance(item, Named) and _is_points(item.item))


def _are_joined_relations(item: Items) -> bool:
    return bool(item.joined) and as_real_set(item, is_reference=True) is not None


_MIRRORED = {"<": ">", ">": "<", "le": "ge", "ge": "le", "=": "=", "ne": "ne"}


def _equal_relations(reference: Relation, answer: Relation) -> bool:
    """Return True for equal chains, read in either direction, with differences of sides equal up to a constant."""
    if reference.operators != answer.operators or reference.operators[0] in "<leg>":
        mirrored = Relation(tuple(_MIRRORED[one] for one in answer.operators[::-1]), answer.sides[::-1])
        answer = mirrored if answer.operators != reference.operators else answer
    if reference.operators != answer.operators:
        return False
    if len(reference.sides) > 2:
        return _equal_in_order(reference.sides, answer.sides)
    sides = [*reference.sides, *answer.sides]
    if not all(isinstance(side, Value) for side in sides):
        return _equal_in_order(reference.sides, answer.sides) or (
            reference.operators[0] in ("=", "ne") and _equal_in_order(reference.sides, answer.sides[::-1])
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


def _as_relation(named: Named) -> Relation | None:
    try:
        left = Value(parse_formula(named.name), named.name)
    except FormulaError:
        return None
    return Relation(("=",), (left, named.item))


_INDEX = re.compile(r"_(?:\{[0-9]+\}|[0-9])$")


def _equal_lists(reference: Items, answer: Item) -> bool:
    if isinstance(answer, Named) and isinstance(answer.item, Items):
        names = _tuple_names(answer.name)
        if not names:
            answer = Items(answer.item.kind, tuple(Named(answer.name, item) for item in answer.item.items))
    theirs = answer
    if isinstance(answer, Items) and answer.kind == "list" and any(isinstance(item, Named) for item in answer.items):
        theirs = Items("list", _carried(answer.items), answer.joined)
    reference, theirs = _with_one_parameter(reference, theirs)
    if isinstance(theirs, Items) and len(reference.items) == len(theirs.items) == 1:
        return equals(reference.items[0], theirs.items[0])
    ours = Items("list", _carried(reference.items), reference.joined)
    ours, theirs = _without_indices(ours, theirs)
    names = [item.name for item in ours.items if isinstance(item, Named)]
    if len(set(names)) == len(ours.items) > 1:
        return _equal_by_name(ours, theirs)
    if isinstance(theirs, Text):
        return "".join(map(_letter_of, ours.items)) == theirs.text and all(map(_letter_of, ours.items))
    if not isinstance(theirs, Items) or theirs.kind not in ("list", "set"):
        return False
    if _has_order(reference):
        return _equal_in_order(reference.items, theirs.items)
    if theirs.kind == "set" and all(isinstance(item, Value) for item in ours.items):
        return _equal_items(Items("set", ours.items), theirs) and len(ours.items) == len(theirs.items)
    return _equal_in_any_order([_unnamed(item, theirs) for item in ours.items], _anonymous(ours, theirs))


def _with_one_parameter(reference: Items, answer: Item) -> tuple[Items, Item]:
    r"""Drop a final ``k \in \mathbb{Z}`` from both, if both have it, and use the reference's name."""
    ours = reference.items[-1] if reference.items else None
    theirs = answer.items[-1] if isinstance(answer, Items) and answer.kind == "list" and answer.items else None
    if not (isinstance(ours, Named) and isinstance(theirs, Named) and isinstance(answer, Items)):
        return reference, answer
    if not isinstance(ours.item, Text) or ours.item != theirs.item or "\\mathbb" not in ours.item.text:
        return reference, answer
    items = tuple(_renamed(item, theirs.name, ours.name) for item in answer.items[:-1])
    return Items("list", reference.items[:-1], reference.joined), Items("list", items, answer.joined)


def _renamed(item: Item, old: str, new: str) -> Item:
    if isinstance(item, Named):
        return Named(item.name, _renamed(item.item, old, new))
    return Value(renamed(item.node, old, new), item.text, item.is_percent) if isinstance(item, Value) else item


def _without_indices(ours: Items, theirs: Item) -> tuple[Items, Item]:
    """Drop all names, if the reference's are one name and the answer's are that name with indices (``x_1``)."""
    names = {item.name if isinstance(item, Named) else "" for item in ours.items}
    if len(names) != 1 or not isinstance(theirs, Items):
        return ours, theirs
    others = {_INDEX.sub("", item.name) if isinstance(item, Named) else "" for item in theirs.items}
    if names == {""} or not others <= names | {""} or len(others) != 1:
        return ours, theirs
    plain = [Items(one.kind, tuple(map(bare, one.items)), one.joined) for one in (ours, theirs)]
    return plain[0], plain[1]


def _unnamed(item: Item, theirs: Items) -> Item:
    is_bare = not any(isinstance(each, Named) for each in theirs.items)
    return item.item if isinstance(item, Named) and is_bare else item


def _anonymous(ours: Items, theirs: Items) -> list[Item]:
    if any(isinstance(item, Named) for item in ours.items):
        return list(theirs.items)
    names = [item.name for item in theirs.items if isinstance(item, Named)]
    if names and len(names) != len(theirs.items):
        return list(theirs.items)
    return list(map(bare, theirs.items))


def _carried(items: Sequence[Item]) -> tuple[Item, ...]:
    """Apply the name of the first value in ``a = 4, -8`` to the next."""
    found: list[Item] = []
    for item in items:
        last = found[-1] if found else None
        is_carried = isinstance(last, Named) and isinstance(item, Value | Items | Span | Text)
        found.append(Named(last.name, item) if is_carried and isinstance(last, Named) else item)
    return tuple(found)


def _equal_by_name(reference: Items, answer: Item) -> bool:
    """Compare ``x = 2, y = 3`` by name in any order, or as a tuple or list in the reference's order."""
    ours = [item for item in reference.items if isinstance(item, Named)]
    if isinstance(answer, Named) and (names := _tuple_names(answer.name)):
        inside = _as_pair(answer.item)
        if not isinstance(inside, Items) or len(names) != len(inside.items):
            return False
        answer = Items("list", tuple(Named(name, item) for name, item in zip(names, inside.items, strict=True)))
    answer = _as_pair(answer)
    if not isinstance(answer, Items) or len(answer.items) != len(ours):
        return False
    if any(isinstance(item, Named) for item in answer.items):
        theirs = {item.name: item.item for item in answer.items if isinstance(item, Named)}
        return len(theirs) == len(ours) and all(
            item.name in theirs and equals(item.item, theirs[item.name]) for item in ours
        )
    return answer.kind in ("list", "tuple") and _equal_in_order([item.item for item in ours], answer.items)


def _equal_items(reference: Items, answer: Items) -> bool:
    if reference.kind == "set" and answer.kind in ("set", "list"):
        if answer.kind == "list" and len(answer.items) != len(reference.items):
            return False
        return _covers(reference.items, answer.items) and _covers(answer.items, reference.items)
    return reference.kind == answer.kind and _equal_in_order(reference.items, answer.items)


def _covers(these: Sequence[Item], those: Sequence[Item]) -> bool:
    return all(any(equals(one, other) for other in those) for one in these)


def _equal_in_order(ours: Sequence[Item], theirs: Sequence[Item]) -> bool:
    return len(ours) == len(theirs) and all(map(equals, ours, theirs))


def _equal_in_any_order(ours: Sequence[Item], theirs: Sequence[Item]) -> bool:
    left = list(theirs)
    for item in ours:
        match = next((index for index, other in enumerate(left) if equals(item, other)), None)
        if match is None:
            return False
        del left[match]
    return not left


def _has_order(reference: Items) -> bool:
    """Return True if the order matters: a list of bare letters or words, or a continued sequence."""
    if any(isinstance(item, Text) and "\\ldots" in item.text for item in reference.items):
        return True
    letters = [_letter_of(item) for item in reference.items]
    if all(letters):
        return bool(letters != sorted(letters) or not "".join(letters).isupper())
    names = [isinstance(item, Text) or _is_variable(item) for item in reference.items]
    return all(names) and reference.joined != "and"


def _is_variable(item: Item) -> bool:
    return isinstance(item, Value) and item.node.kind == "symbol"


def _letter_of(item: Item) -> str:
    if isinstance(item, Choice):
        return item.letter
    return item.text if isinstance(item, Text) and len(item.text) == 1 else ""


def _tuple_names(name: str) -> list[str]:
    return [part.strip() for part in name[1:-1].split(",")] if name.startswith("(") and "," in name else []


def _values_by_name(item: Item) -> Item:
    """Return ``y = 2, x = 1`` as the tuple ``(1, 2)``, in alphabetical order; anything else unchanged."""
    if not isinstance(item, Items) or item.kind != "list":
        return item
    named = sorted((each for each in item.items if isinstance(each, Named)), key=lambda each: each.name)
    is_all = len({each.name for each in named}) == len(item.items) > 1
    return Items("tuple", tuple(each.item for each in named)) if is_all else item


def _as_pair(item: Item) -> Item:
    return item.pair if isinstance(item, Span) and item.pair is not None else item
