"""Equality of lists, sets and tuples, with or without names before their values."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from rlcore.rewards.mathematics.formula import renamed
from rlcore.rewards.mathematics.structures import Choice, Item, Items, Named, Span, Text, Value

Equal = Callable[[Item, Item], bool]
_INDEX = re.compile(r"_(?:\{[0-9]+\}|[0-9])$")


def equal_lists(equals: Equal, reference: Items, answer: Item) -> bool:
    """Compare lists in any order, unless their order matters; repeated items count."""
    if isinstance(answer, Named) and isinstance(answer.item, Items):
        names = tuple_names(answer.name)
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
        return equal_by_name(equals, ours, theirs)
    if isinstance(theirs, Text):
        return "".join(map(letter_of, ours.items)) == theirs.text and all(map(letter_of, ours.items))
    if not isinstance(theirs, Items) or theirs.kind not in ("list", "set"):
        return False
    if _has_order(reference):
        return equal_in_order(equals, reference.items, theirs.items)
    if theirs.kind == "set" and all(isinstance(item, Value) for item in ours.items):
        return equal_items(equals, Items("set", ours.items), theirs) and len(ours.items) == len(theirs.items)
    return _equal_in_any_order(equals, [_unnamed(item, theirs) for item in ours.items], _anonymous(ours, theirs))


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
    plain = [Items(one.kind, tuple(map(_bare, one.items)), one.joined) for one in (ours, theirs)]
    return plain[0], plain[1]


def _bare(item: Item) -> Item:
    return item.item if isinstance(item, Named) else item


def _unnamed(item: Item, theirs: Items) -> Item:
    """Return an item of the reference, without its name if the answer has none."""
    is_bare = not any(isinstance(each, Named) for each in theirs.items)
    return item.item if isinstance(item, Named) and is_bare else item


def _anonymous(ours: Items, theirs: Items) -> list[Item]:
    """Return the answer's items, without their names if the reference has none."""
    if any(isinstance(item, Named) for item in ours.items):
        return list(theirs.items)
    names = [item.name for item in theirs.items if isinstance(item, Named)]
    if names and len(names) != len(theirs.items):
        return list(theirs.items)
    return [item.item if isinstance(item, Named) else item for item in theirs.items]


def _carried(items: Sequence[Item]) -> tuple[Item, ...]:
    """Apply the name of the first value in ``a = 4, -8`` to the next."""
    found: list[Item] = []
    for item in items:
        last = found[-1] if found else None
        is_carried = isinstance(last, Named) and isinstance(item, Value | Items | Span | Text)
        found.append(Named(last.name, item) if is_carried and isinstance(last, Named) else item)
    return tuple(found)


def equal_by_name(equals: Equal, reference: Items, answer: Item) -> bool:
    """Compare ``x = 2, y = 3`` by name in any order, or as a tuple or list in the reference's order."""
    ours = [item for item in reference.items if isinstance(item, Named)]
    if isinstance(answer, Named) and (names := tuple_names(answer.name)):
        inside = as_pair(answer.item)
        if not isinstance(inside, Items) or len(names) != len(inside.items):
            return False
        answer = Items("list", tuple(Named(name, item) for name, item in zip(names, inside.items, strict=True)))
    answer = as_pair(answer)
    if not isinstance(answer, Items) or len(answer.items) != len(ours):
        return False
    if any(isinstance(item, Named) for item in answer.items):
        theirs = {item.name: item.item for item in answer.items if isinstance(item, Named)}
        return len(theirs) == len(ours) and all(
            item.name in theirs and equals(item.item, theirs[item.name]) for item in ours
        )
    return answer.kind in ("list", "tuple") and equal_in_order(equals, [item.item for item in ours], answer.items)


def equal_items(equals: Equal, reference: Items, answer: Items) -> bool:
    """Compare sets by content, tuples and vectors in order and by kind."""
    if reference.kind == "set" and answer.kind in ("set", "list"):
        if answer.kind == "list" and len(answer.items) != len(reference.items):
            return False
        return _covers(equals, reference.items, answer.items) and _covers(equals, answer.items, reference.items)
    return reference.kind == answer.kind and equal_in_order(equals, reference.items, answer.items)


def _covers(equals: Equal, these: Sequence[Item], those: Sequence[Item]) -> bool:
    return all(any(equals(one, other) for other in those) for one in these)


def equal_in_order(equals: Equal, ours: Sequence[Item], theirs: Sequence[Item]) -> bool:
    """Return True if both have equal length and pairwise equal items."""
    return len(ours) == len(theirs) and all(map(equals, ours, theirs))


def _equal_in_any_order(equals: Equal, ours: Sequence[Item], theirs: Sequence[Item]) -> bool:
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
    letters = [letter_of(item) for item in reference.items]
    if all(letters):
        return bool(letters != sorted(letters) or not "".join(letters).isupper())
    names = [isinstance(item, Text) or _is_variable(item) for item in reference.items]
    return all(names) and reference.joined != "and"


def _is_variable(item: Item) -> bool:
    return isinstance(item, Value) and item.node.kind == "symbol"


def letter_of(item: Item) -> str:
    """Return the letter of an item or choice; empty for anything else."""
    if isinstance(item, Choice):
        return item.letter
    return item.text if isinstance(item, Text) and len(item.text) == 1 else ""


def tuple_names(name: str) -> list[str]:
    """Return the names in ``(x, y)``; empty for one name."""
    return [part.strip() for part in name[1:-1].split(",")] if name.startswith("(") and "," in name else []


def values_by_name(item: Item) -> Item:
    """Return ``y = 2, x = 1`` as the tuple ``(1, 2)``, in alphabetical order; anything else unchanged."""
    if not isinstance(item, Items) or item.kind != "list":
        return item
    named = sorted((each for each in item.items if isinstance(each, Named)), key=lambda each: each.name)
    is_all = len({each.name for each in named}) == len(item.items) > 1
    return Items("tuple", tuple(each.item for each in named)) if is_all else item


def as_pair(item: Item) -> Item:
    """Return an interval that may be a pair as a pair; anything else unchanged."""
    return item.pair if isinstance(item, Span) and item.pair is not None else item
