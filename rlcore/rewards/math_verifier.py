"""Equality of the values that two texts state, and the form of an answer. Runs in a grader process.

An answer has no redundant operation, and the form that the problem asks for. A problem asks for another form if one of
its formulas equals the reference and has another structure: "expand ``(x+1)^2``". Then an answer must have the
structure of the reference: expanded, with equal factors up to constants, no more terms, no larger numbers under a root,
and no other functions. Otherwise any form is accepted. See ``docs/rewards.md`` for the policy.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any

from rlcore.rewards.mathematics.equality import equals
from rlcore.rewards.mathematics.exact_values import constant_free_key, equal_values, free_symbols, is_infinite
from rlcore.rewards.mathematics.formula import Item, Named, Node, Relation, Text, Value, bare, mul, walk
from rlcore.rewards.mathematics.numeric_values import UndefinedError, exact_rational
from rlcore.rewards.mathematics.reading import read
from rlcore.rewards.mathematics.spelling import canonical
from rlcore.rewards.units import parse_number, parse_quantity

_MAX_TEXT = 80  # longest LaTeX outside of the grammar that an answer may have to repeat
_WARM_UP = (r"\frac{\sqrt{8}}{2}", "x^2+1", "x=5", "[1,2)", r"\{1,2\}", r"\sin x", r"\begin{pmatrix}1\\2\end{pmatrix}")


def warm_up() -> None:
    """Parse and compare one item of each kind, so that forked workers start warm."""
    for text in _WARM_UP:
        grade({"answer": text, "reference": text})
    grade({"answer": r"\sqrt{8}", "reference": r"2\sqrt{2}"})


def grade(request: dict[str, Any]) -> bool | str:
    """Return True if ``answer`` equals ``reference`` (both LaTeX or plain mathematics). Unparsable answers are wrong.

    ``problem`` has formulas of the problem. An answer that restates one of them, not in the form of the reference, is
    wrong. With None, any form is accepted. Without an ``answer``, return why the reference is unusable, or "".

    Raises:
        ValueError: No answer can be graded by the reference (``1/0``).
    """
    reference = read(request["reference"], is_reference=True)
    error = _error_of(request["reference"])
    if "answer" not in request:
        return error
    if error:
        raise ValueError(f"the reference {error}")
    try:
        is_equal = equals(reference, read(request["answer"]))
        if not is_equal and isinstance(reference, Named):  # a name that only references may have
            named = read(request["answer"], is_reference=True)
            is_equal = isinstance(named, Named) and named.name == reference.name and equals(reference.item, named.item)
    except (MemoryError, RecursionError):
        raise
    except Exception:  # noqa: BLE001 - an answer that breaks the comparison is wrong
        return False
    problem = request.get("problem")
    return is_equal and (problem is None or _is_worked_out(request["reference"], request["answer"], problem))


@lru_cache(maxsize=512)
def _error_of(text: str) -> str:
    reference = read(text, is_reference=True)
    if isinstance(reference, Text) and len(text) > _MAX_TEXT and "\\" in text:
        return f"is {text[:40]!r}, which is not a readable formula, and too long to be repeated"
    try:
        is_sound = equals(reference, read(text)) or equals(reference, reference)
    except UndefinedError:
        return f"is {text[:40]!r}, which has no value"
    return "" if is_sound else f"is {text[:40]!r}, which does not equal itself"


# Operations without effect: 1\cdot x, 1(x+1), x^1, x/1.
_IN_VAIN = re.compile(
    r"(?<![0-9.^_])1 ?(?:\*|\()|\* ?1(?![0-9.])|(?<![0-9.])0 ?[+*]|\^ ?(?:[01](?![0-9.])|\{ ?[01] ?\})|/ ?1(?![0-9.])"
    r"|\\frac ?\{[^{}]*\} ?\{ ?1 ?\}"
)
_MAX_POWER = 20
_PARTS = ("item", "items", "sides", "left", "right", "pair", "rows")


def _is_worked_out(reference: str, answer: str, problem: Sequence[str]) -> bool:
    """Return True if an answer equal to the reference has no redundant operation, and the requested form."""
    ours, theirs = bare(read(reference, is_reference=True)), bare(read(answer))
    if _has_open_division(theirs) and not _has_open_division(ours):
        return False
    if not isinstance(ours, Value) and _has_open_number(ours, theirs):
        return False
    if isinstance(theirs, Relation) and _common_factor(theirs) > 1 >= _common_factor(ours):
        return False
    if isinstance(ours, Relation):
        return all(_keeps_sides(ours, theirs, read(formula)) for formula in problem)
    if not isinstance(ours, Value) or not isinstance(theirs, Value) or ours.node == theirs.node:
        return True
    if ours.node.kind == "number":
        return parse_quantity(theirs.text) is not None
    if _idle(theirs.node) - _idle(ours.node) or _new_names(theirs.node, ours.node):
        return False
    if _IN_VAIN.search(canonical(answer)) and not _IN_VAIN.search(canonical(reference)):
        return False
    requested = [item.node for item in map(read, problem) if isinstance(item, Value)]
    return all(_has_form(ours.node, theirs.node, node) for node in requested if _is_asked_for(ours.node, node))


def _common_factor(item: Item) -> int:
    sides = item.sides if isinstance(item, Relation) else ()
    if not all(isinstance(side, Value) for side in sides):
        return 1
    return math.gcd(*(_coefficient(term) for side in sides if isinstance(side, Value) for term in _terms(side.node)))


def _coefficient(term: Node) -> int:
    numbers = [(Fraction(factor.value), times) for factor, times in _powers(term) if factor.kind == "number"]
    is_whole = all(value.denominator == 1 and times > 0 for value, times in numbers)
    return math.prod(int(value) ** times for value, times in numbers) if is_whole else 1


def _new_names(answer: Node, reference: Node) -> frozenset[str]:
    ours = free_symbols(reference)
    return free_symbols(answer) - ours - ({"c"} if "C" in ours else set())


def _has_open_number(reference: Item, answer: Item) -> bool:
    r"""Return True if a reference consists of numbers, and the answer has an unevaluated one: ``\\pm\\sqrt4``."""
    ours = list(_leaves(reference))
    theirs = [leaf for leaf in _leaves(answer) if not free_symbols(leaf) and not is_infinite(leaf)]
    return bool(ours) and all(map(_is_number, ours)) and not all(map(_is_number, theirs))


def _leaves(item: object) -> Iterator[Node]:
    if isinstance(item, Node):
        yield item
    elif isinstance(item, Value):
        yield item.node
    elif isinstance(item, tuple):
        yield from (leaf for part in item for leaf in _leaves(part))
    elif dataclasses.is_dataclass(item):
        yield from (leaf for name in (*_PARTS, "low", "high") for leaf in _leaves(getattr(item, name, None)))


def _is_number(node: Node) -> bool:
    r"""Return True for an evaluated number: ``2``, ``-3/4``; not ``\\sqrt4``, ``2^2``, ``1+1``."""
    powers = [part.args for part in walk(node) if part.kind == "pow"]
    is_left = any(exact_rational(exponent) != -1 and exact_rational(base) != 10 for base, exponent in powers)
    return not is_left and exact_rational(node) is not None and not _idle(node)


def _has_open_division(item: object) -> bool:
    if isinstance(item, Value):
        number = parse_number(item.text)
        return number is not None and not number.is_evaluated
    parts = item if isinstance(item, tuple) else [getattr(item, name, ()) for name in _PARTS]
    return any(_has_open_division(part) for part in parts if isinstance(part, tuple) or dataclasses.is_dataclass(part))


def _idle(node: Node) -> frozenset[str]:
    """Return the redundant operations: sums of numbers, terms that cancel, powers of powers."""
    found = set()
    for part in walk(node):
        if part.kind == "add":
            found |= set(_idle_in_sum(part.args))
        if part.kind == "mul" and _numbers_of(part) > 1:
            found.add("product of numbers")
        if part.kind == "pow" and part.args[0].kind == "pow" and exact_rational(part.args[1]) != -1:
            found.add("power of a power")
        if part.kind == "pow" and exact_rational(part.args[0]) in (0, 1):
            found.add("power of 0 or 1")
        if part.kind == "call" and part.value == "ln" and any(each.value == "e" for each in walk(part.args[0])):
            found.add("logarithm of a power of e")
    return frozenset(found)


def _idle_in_sum(terms: Sequence[Node]) -> Iterator[str]:
    if sum(term.kind == "number" for term in terms) > 1 or Node("number", Fraction(0)) in terms:
        yield "sum of numbers"
    if _cancels(terms):
        yield "terms that cancel"
    if len(set(terms)) < len(terms):
        yield "a term twice"
    if any(term.kind == "pow" and exact_rational(term) is not None for term in terms):
        yield "power of a number"


def _is_reducible(node: Node) -> bool:
    sides = [1, 1]
    for factor, times in _powers(node):
        value = exact_rational(factor) if factor.kind == "number" else None
        if value is not None and value.denominator == 1:
            sides[times < 0] *= int(value)
    return math.gcd(*sides) > 1 and sides[1] != 1


def _numbers_of(product: Node) -> int:
    return sum(
        factor.kind == "number" and Fraction(factor.value).denominator == 1 and abs(Fraction(factor.value)) > 1
        for factor in product.args
    )


def _cancels(terms: Sequence[Node]) -> bool:
    plain = [term for term in terms if not _is_negative(term)]
    return any(
        term.args[1:] == (other,) or term.args[1:] == other.args
        for term in terms
        if _is_negative(term)
        for other in plain
    )


def _is_negative(term: Node) -> bool:
    return term.kind == "mul" and term.args[0] == Node("number", Fraction(-1))


@lru_cache(maxsize=256)
def _is_asked_for(reference: Node, formula: Node) -> bool:
    try:
        return _form(reference) != _form(formula) and equal_values(reference, formula)
    except UndefinedError:
        return False


def _form(node: Node) -> tuple[object, ...]:
    plain = (_is_expanded(node), len(_terms(node)), _factors(node))
    return (*plain, _radicands(node), _roots_below(node), _calls(node))


def _has_form(reference: Node, answer: Node, requested: Node) -> bool:
    """Return True if an answer has the structure of the reference, where the problem's formula has not."""
    if _calls(answer) - _calls(reference) or _roots_below(answer) > _roots_below(reference):
        return False
    if max(_radicands(answer), default=0) > max(_radicands(reference), default=0):
        return False
    if (not _is_divided(reference) and _is_divided(answer)) or (_is_reducible(answer) and not _is_reducible(reference)):
        return False
    if _is_expanded(reference):
        most = len(_terms(reference)) if free_symbols(reference) else _width(reference)
        return _is_expanded(answer) and len(_terms(answer)) <= most
    if _is_divided(reference):
        return _fraction(answer) == _fraction(reference)
    return _factors(answer) == _factors(reference) or _factors(reference) == _factors(requested)


def _is_divided(node: Node) -> bool:
    return any(is_below for _, is_below in _factors(node)) or any(
        part.kind == "pow" and free_symbols(part.args[0]) and (exact_rational(part.args[1]) or 0) < 0
        for part in walk(node)
    )


def _powers(node: Node) -> Iterator[tuple[Node, int]]:
    open_factors = [(node, 1)]
    while open_factors:
        factor, times = open_factors.pop()
        exponent = exact_rational(factor.args[1]) if factor.kind == "pow" else None
        if factor.kind == "mul":
            open_factors += [(each, times) for each in factor.args]
        elif exponent is not None and exponent.denominator == 1 and 0 < abs(exponent) <= _MAX_POWER:
            open_factors.append((factor.args[0], times * int(exponent)))
        else:
            yield factor, times


def _fraction(node: Node) -> tuple[int, ...]:
    """Return keys of numerator and denominator, which constant factors do not change."""
    sides: list[list[Node]] = [[], []]
    for factor, times in _powers(node):
        sides[times < 0] += [factor] * abs(times)
    return tuple(constant_free_key(mul(*side)) if side else 1 for side in sides)


def _terms(node: Node) -> tuple[Node, ...]:
    if node.kind == "mul" and len(node.args) == 2 and _is_negative(node):
        return _terms(node.args[1])
    return tuple(term for each in node.args for term in _terms(each)) if node.kind == "add" else (node,)


def _width(node: Node) -> int:
    if node.kind == "add":
        return sum(map(_width, node.args))
    return math.prod(map(_width, node.args)) if node.kind == "mul" else 1


def _is_expanded(node: Node) -> bool:
    """Return True if no sum with a variable is in a product, under a power, or after a minus."""
    terms = node.args if node.kind == "add" else (node,)
    return not any(
        part.kind == "add" and free_symbols(part)
        for term in terms
        for part in walk(term if term.kind != "pow" else term.args[0])
        if not _is_in_exponent(part, term)
    )


def _is_in_exponent(part: Node, term: Node) -> bool:
    return any(each.kind == "pow" and part in walk(each.args[1]) for each in walk(term))


def _factors(node: Node) -> Counter[tuple[int, bool]]:
    """Return the factors with a variable and True if in the denominator, by keys that constants do not change."""
    found: Counter[tuple[int, bool]] = Counter()
    for factor, times in _powers(node):
        if free_symbols(factor):
            found[constant_free_key(factor), times < 0] += abs(times)
    return found


def _radicands(node: Node) -> frozenset[Fraction]:
    roots = [part.args for part in walk(node) if part.kind == "pow"]
    values = [(exact_rational(base), exact_rational(exponent)) for base, exponent in roots]
    return frozenset(
        base for base, exponent in values if base is not None and exponent is not None and exponent.denominator > 1
    )


def _roots_below(node: Node) -> int:
    below = [part for part in walk(node) if part.kind == "pow" and (exact_rational(part.args[1]) or 0) < 0]
    return sum(bool(_radicands(each)) for each in below)


def _calls(node: Node) -> frozenset[object]:
    return frozenset(part.value for part in walk(node) if part.kind in ("call", "big"))


def _keeps_sides(reference: Relation, answer: Item, requested: Item) -> bool:
    """Return True if an equation has the reference's sides, if the problem has the equation in another form."""
    if not isinstance(requested, Relation | Named) or not isinstance(answer, Relation):
        return True
    return not _same_sides(requested, answer) or _same_sides(reference, answer)


def _same_sides(requested: Item, answer: Relation) -> bool:
    return isinstance(requested, Relation) and any(
        _equal_sides(requested.sides, sides) for sides in (answer.sides, answer.sides[::-1])
    )


def _equal_sides(ours: Sequence[Item], theirs: Sequence[Item]) -> bool:
    if len(ours) != len(theirs):
        return False
    return all(
        isinstance(one, Value) and isinstance(other, Value) and equal_values(one.node, other.node)
        for one, other in zip(ours, theirs, strict=True)
    )
