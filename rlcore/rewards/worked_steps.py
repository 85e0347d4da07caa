"""Check of a worked derivation by exact arithmetic on the equations in its text.

A valid derivation is defined narrowly, so that listing numbers does not give one: every equation between two arithmetic
expressions is true, there is at least one, and the *last* one ends in the reference. ``48/2 = 24, 48 + 24 = 72. ####
27`` is valid for 72; ``1+71 = 72, 1+72 = 73`` is not. Rounded results (``10/3 = 3.33``) are not true.

A policy can still get partial credit for a second guess (``0+5 = 5. #### 4``): keep the credit far below 1.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from itertools import pairwise
from types import MappingProxyType

_MAX_TEXT, _MAX_SIDE = 20_000, 200
_TIMES = re.compile(r"\\times|\\cdot|×|·|(?<=[0-9)]) ?x ?(?=[0-9(])")
_GROUP_COMMA = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")
_RUN = re.compile(r"[0-9.+*/()= -]{3,}")
_SIDE = re.compile(r"[0-9(][0-9.+*/() -]*")
_OPERATORS: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = MappingProxyType(
    {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
)


def is_valid_derivation(text: str, reference: Fraction) -> bool:
    """Return True if all equations in ``text`` are true and the last one ends in ``reference``. Linear time."""
    if len(text) > _MAX_TEXT:
        return False
    found = list(_equations(text))
    return bool(found) and all(left == right for left, right in found) and found[-1][1] == reference


def _equations(text: str) -> Iterator[tuple[Fraction, Fraction]]:
    """Yield both sides of each ``=`` between two expressions: two pairs for ``5*7 = 30+5 = 35``."""
    written = _GROUP_COMMA.sub("", _TIMES.sub("*", text.replace("$", "").replace("÷", "/")))
    for run in _RUN.findall(written):
        values = [_value(side.strip()) for side in run.rstrip(" .").split("=")]
        for left, right in pairwise(values):
            if left is not None and right is not None:
                yield left, right


def _value(side: str) -> Fraction | None:
    """Return the value of a side; None if it is not arithmetic: it begins with an operator, or has no operation."""
    if len(side) > _MAX_SIDE or not _SIDE.fullmatch(side):
        return None
    try:
        return _evaluate(ast.parse(side, mode="eval").body, side)
    except (SyntaxError, ValueError, ZeroDivisionError):
        return None


def _evaluate(node: ast.expr, source: str) -> Fraction:
    if isinstance(node, ast.Constant):
        return Fraction(ast.get_source_segment(source, node) or "")  # exact, unlike the node's float
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluate(node.operand, source)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_evaluate(node.left, source), _evaluate(node.right, source))
    raise ValueError(f"not arithmetic: {ast.dump(node)[:80]}")
