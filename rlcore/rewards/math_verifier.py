r"""Symbolic equality by math_verify under stricter rules. Runs in a grader process; the only file that imports it.

math_verify alone says yes to ``[5,5]`` for 5 (a set for a number), ``6=5`` for 5, ``0^0`` for 1 and, at six decimals,
to ``0.1234568`` for ``0.1234567``.
"""

from __future__ import annotations

import re
from typing import Any, cast

from latex2sympy2_extended.logic import And  # type: ignore[import-untyped]
from math_verify import LatexExtractionConfig, parse, verify
from sympy import Basic, Expr, FiniteSet, Float, Interval, MatrixBase, Pow, Set, Tuple, nsimplify  # type: ignore[import-untyped]
from sympy.core.relational import Relational  # type: ignore[import-untyped]

_DECIMALS = 12  # floats are compared at this many decimals; rationals exactly
_PI = re.compile(r"(?<![A-Za-z\\])pi(?![A-Za-z])|π")
_LATEX = [LatexExtractionConfig(boxed_match_priority=0)]
# One of each grammar rule and comparison, because the first use of each costs up to 100 ms.
_WARM_UP = (
    "5",
    r"\frac{\sqrt{8}}{2}",
    "x^2+1",
    "x=5",
    "[1,2)",
    r"\{1,2\}",
    "1.5x",
    r"\begin{pmatrix}1\\2\end{pmatrix}",
)


def warm_up() -> None:
    """Parse and compare one of each kind, so that forked workers start warm."""
    for text in _WARM_UP:
        grade({"answer": text, "reference": text})
    grade({"answer": "x(x+1)", "reference": "x^2+x"})


def grade(request: dict[str, Any]) -> bool:
    """Whether ``answer`` equals ``reference`` (both LaTeX or plain mathematics); an unparsable answer is not equal.

    Raises:
        ValueError: the reference itself cannot be parsed.
    """
    reference = _parse(request["reference"])
    if reference is None:
        raise ValueError(f"the reference {request['reference']!r} cannot be parsed")
    answer = _parse(request["answer"])
    if answer is None or not _comparable(reference, answer) or _is_undefined(answer):
        return False
    if {_is_rational(reference), _is_rational(answer)} == {True, False}:
        return False  # at twelve decimals 3.14159265358979 would be pi
    return bool(
        verify(
            reference, answer, float_rounding=_DECIMALS, numeric_precision=30, timeout_seconds=None, raise_on_error=True
        )
    )


def _parse(text: str) -> Basic | MatrixBase | None:
    written = _PI.sub(lambda _: r"\pi ", text.replace("**", "^").replace(r"\varnothing", r"\emptyset"))
    latex = "\\boxed{" + written + "}"
    found = parse(latex, _LATEX, fallback_mode="no_fallback", parsing_timeout=None)
    return found[0] if found else None


def _comparable(reference: Basic | MatrixBase, answer: Basic | MatrixBase) -> bool:
    """A set is compared with a set, a matrix with a matrix; ``5`` may answer ``x = 5``, not the reverse."""
    kinds = (_kind(reference), _kind(answer))
    allowed = (("relation", "value"), ("interval", "set"), ("set", "interval"), ("points", "set"), ("set", "points"))
    return kinds[0] == kinds[1] or kinds in allowed


def _kind(expression: Basic | MatrixBase) -> str:
    kinds: tuple[tuple[str, Any], ...] = (
        ("relation", Relational | And),
        ("matrix", MatrixBase),
        ("interval", Interval),
        ("points", FiniteSet | Tuple),
        ("set", Set),
    )
    return next((name for name, types in kinds if isinstance(expression, types)), "value")


def _is_rational(expression: Basic | MatrixBase) -> bool | None:
    """Whether a value is a rational number, a decimal taken as it is written; None where sympy cannot tell."""
    if not isinstance(expression, Expr):
        return None
    exact = nsimplify(expression, rational=True) if expression.has(Float) else expression
    return cast(bool | None, exact.is_rational)


def _is_undefined(expression: Basic | MatrixBase) -> bool:
    """Whether the expression holds a power 0^0, which sympy calls 1."""
    powers = expression.atoms(Pow)
    return any(power.exp.doit().is_zero and power.base.doit().is_zero for power in powers)
