"""Mutants of a Python file: the file with one expression changed, for :mod:`tests.mutation.run`."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

COMMUTATIVE = {"maximum", "minimum", "isclose", "max", "min"}
SWAPPED_OPERATORS: dict[type[ast.AST], tuple[type[ast.AST], ...]] = {
    ast.Lt: (ast.LtE, ast.Gt),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.Lt),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Div,),
    ast.Div: (ast.Mult,),
    ast.Pow: (ast.Mult,),
    ast.BitAnd: (ast.BitOr,),
    ast.BitOr: (ast.BitAnd,),
    ast.And: (ast.Or,),
    ast.Or: (ast.And,),
}
SWAPPED_NAMES = {
    "min": "max",
    "max": "min",
    "minimum": "maximum",
    "maximum": "minimum",
    "sum": "mean",
    "mean": "sum",
    "any": "all",
    "all": "any",
    "exp": "expm1",
    "expm1": "exp",
    "zeros_like": "ones_like",
    "ones_like": "zeros_like",
}
DROPPED_METHODS = ("detach", "masked_fill", "clamp", "double", "square", "abs")  # x.detach() becomes x


@dataclass(frozen=True)
class Mutant:
    """One change: where, what, and the whole file with it."""

    path: Path
    line: int
    change: str
    source: str


def mutants_of(path: Path, *, root: Path) -> list[Mutant]:
    """Every mutant of the file ``path`` below ``root``."""
    tree = ast.parse((root / path).read_text(encoding="utf-8"))
    original = ast.unparse(tree)
    found = []
    for node, replace in nodes(tree):
        for mutated in mutations(node):
            replace(mutated)
            source = ast.unparse(ast.fix_missing_locations(tree))
            replace(node)
            if source == original:  # two equal arguments in the other order
                continue
            change = f"{shorten(node)}  ->  {shorten(mutated)}"
            found.append(Mutant(path, getattr(node, "lineno", 0), change, source))
    return found


def nodes(parent: ast.AST) -> Iterator[tuple[ast.AST, Callable[[ast.AST], None]]]:
    """Every node that computes something, with a way to put another in its place."""
    for field, value in ast.iter_fields(parent):
        if field in ("annotation", "returns", "decorator_list"):  # executed by no formula
            continue
        items = value if isinstance(value, list) else [value]
        for place, item in enumerate(items):
            if not isinstance(item, ast.AST) or is_docstring(item):
                continue

            def replace(new: ast.AST, field: str = field, place: int = place, value: object = value) -> None:
                if isinstance(value, list):
                    value[place] = new
                else:
                    setattr(parent, field, new)

            yield item, replace
            yield from nodes(item)


def is_docstring(node: ast.AST) -> bool:
    """A text that stands as a statement."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def mutations(node: ast.AST) -> Iterator[ast.AST]:
    """The changes that a node can suffer."""
    for mutate in (operators, constants, conditions, returns, unary, names, dropped_calls, arguments):
        yield from mutate(node)


def changed(node: ast.AST, **fields: object) -> ast.AST:
    """A copy of a node with other fields."""
    new = copy.deepcopy(node)
    for name, value in fields.items():
        setattr(new, name, value)
    return new


def operators(node: ast.AST) -> Iterator[ast.AST]:
    """Comparison, arithmetic, boolean and augmented operators."""
    if isinstance(node, ast.Compare):
        for place, operator in enumerate(node.ops):
            for swapped in SWAPPED_OPERATORS[type(operator)]:
                yield changed(node, ops=[*node.ops[:place], swapped(), *node.ops[place + 1 :]])
    elif isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign):
        for swapped in SWAPPED_OPERATORS.get(type(node.op), ()):
            yield changed(node, op=swapped())


def constants(node: ast.AST) -> Iterator[ast.AST]:
    """Numbers and truth values; texts are names and messages, which are checked elsewhere."""
    if not isinstance(node, ast.Constant):
        return
    if isinstance(node.value, bool):
        yield changed(node, value=not node.value)
    elif isinstance(node.value, int | float):
        yield changed(node, value=node.value + 1)
        if node.value not in (0, 1):
            yield changed(node, value=node.value / 2)


def conditions(node: ast.AST) -> Iterator[ast.AST]:
    """The other branch."""
    if isinstance(node, ast.If | ast.IfExp):
        yield changed(node, test=ast.UnaryOp(op=ast.Not(), operand=copy.deepcopy(node.test)))


def returns(node: ast.AST) -> Iterator[ast.AST]:
    """Nothing in place of a result."""
    if isinstance(node, ast.Return) and node.value is not None:
        yield changed(node, value=ast.Constant(value=None))


def unary(node: ast.AST) -> Iterator[ast.AST]:
    """``-x``, ``not x`` and ``~x`` become ``x``."""
    if isinstance(node, ast.UnaryOp):
        yield copy.deepcopy(node.operand)


def names(node: ast.AST) -> Iterator[ast.AST]:
    """min for max, sum for mean, and the bounds of a clamp."""
    if isinstance(node, ast.Attribute) and node.attr in SWAPPED_NAMES:
        yield changed(node, attr=SWAPPED_NAMES[node.attr])
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in SWAPPED_NAMES:
        yield changed(node, id=SWAPPED_NAMES[node.id])
    elif isinstance(node, ast.keyword) and node.arg in ("min", "max"):
        yield changed(node, arg=SWAPPED_NAMES[node.arg])


def dropped_calls(node: ast.AST) -> Iterator[ast.AST]:
    """A method that guards or shapes a tensor is left out."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in DROPPED_METHODS:
        yield copy.deepcopy(node.func.value)


def arguments(node: ast.AST) -> Iterator[ast.AST]:
    """The first two arguments change places, where that changes anything."""
    if isinstance(node, ast.Call) and len(node.args) >= 2 and name_of(node.func) not in COMMUTATIVE:
        first, second, *rest = node.args
        yield changed(node, args=[copy.deepcopy(second), copy.deepcopy(first), *rest])


def name_of(function: ast.AST) -> str:
    """``max`` of ``max(…)`` and of ``torch.max(…)``; empty for what has no name."""
    return function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")


def shorten(node: ast.AST) -> str:
    """The first line of a node's code."""
    first = ast.unparse(node).splitlines()[0] if not isinstance(node, ast.keyword) else f"{node.arg}="
    return first if len(first) <= 90 else f"{first[:87]}..."
