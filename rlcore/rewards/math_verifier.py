r"""Symbolic equality by math_verify under stricter rules. Runs in a grader process; the only file that imports it.

math_verify alone says yes to ``[5,5]`` for 5 (a set for a number), ``6=5`` for 5, ``0^0`` for 1, at six decimals to
``0.1234568`` for ``0.1234567``, and to ``2(3)`` for 5: it takes an integer before any number for a mixed number.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, cast

from latex2sympy2_extended.latex2sympy2 import _Latex2Sympy  # type: ignore[import-untyped]
from latex2sympy2_extended.logic import And  # type: ignore[import-untyped]
from math_verify import LatexExtractionConfig, parse, verify
from sympy import (  # type: ignore[import-untyped]
    Basic,
    Expr,
    FiniteSet,
    Float,
    Interval,
    MatrixBase,
    Pow,
    Rational,
    Set,
    Tuple,
    nsimplify,
)
from sympy.core.relational import Relational  # type: ignore[import-untyped]

_DECIMALS = 12  # floats are compared at this many decimals; rationals exactly
_PI = re.compile(r"(?<![A-Za-z\\])pi(?![A-Za-z])|π")
_LATEX = [LatexExtractionConfig(boxed_match_priority=0)]
_INTEGER = re.compile(r"[0-9]+")
_PROPER = re.compile(r"\\[dt]?frac(?:\{([0-9]{1,9})\}\{([0-9]{1,9})\}|([0-9])([0-9]))")
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
    """Parse and compare one of each kind, so that forked workers start warm.

    Raises:
        RuntimeError: the parser is another than the one whose products are mended here.
    """
    for text in _WARM_UP:
        grade({"answer": text, "reference": text})
    grade({"answer": "x(x+1)", "reference": "x^2+x"})
    if not grade({"answer": "2(3)", "reference": "6"}) or grade({"answer": "2(3)", "reference": "5"}):
        raise RuntimeError(
            "latex2sympy2_extended reads 2(3) as 5: install the version that infra/locks/pipeline.txt names"
        )


def grade(request: dict[str, Any]) -> bool:
    """Whether ``answer`` equals ``reference`` (both LaTeX or plain mathematics); an unparsable answer is not equal.

    ``problem``: formulas of the problem; an answer that is one of them, and not the reference as it is written, has
    solved nothing.

    Raises:
        ValueError: the reference itself cannot be parsed.
    """
    reference = _parse(request["reference"])
    if reference is None:
        raise ValueError(f"the reference {request['reference']!r} cannot be parsed")
    answer = _parse(request["answer"])
    try:
        return answer is not None and _is_equal(reference, answer) and not _restates(reference, answer, request)
    except Exception:  # noqa: BLE001 - whatever an answer does to sympy, it is no right one
        _is_equal(reference, reference)  # where this raises too, the reference is at fault
        return False


def _is_equal(reference: Basic | MatrixBase, answer: Basic | MatrixBase) -> bool:
    if not _comparable(reference, answer) or _is_undefined(answer):
        return False
    if {_is_rational(reference), _is_rational(answer)} == {True, False}:
        return False  # at twelve decimals 3.14159265358979 would be pi
    precision = {"float_rounding": _DECIMALS, "numeric_precision": 30}
    return bool(verify(reference, answer, **precision, timeout_seconds=None, raise_on_error=True))


def _restates(reference: Basic | MatrixBase, answer: Basic | MatrixBase, request: dict[str, Any]) -> bool:
    written = str(answer)  # with its terms in order, which they need not have when nothing is evaluated
    if written == str(reference) or not getattr(answer, "args", ()):
        return False
    return any(str(_parse(formula)) == written for formula in request.get("problem", ()))


def _product(self: Any, factors: Sequence[Any], start: int = 0) -> Any:
    r"""What stands side by side is multiplied, but for ``1\frac{1}{2}``: an integer before a fraction below one."""
    first = self.convert_postfix(factors[start])
    if start == len(factors) - 1 or not isinstance(first, Expr | MatrixBase):
        return _library_product(self, factors, start)
    rest = self.convert_postfix_list(factors, start + 1)
    if isinstance(first, MatrixBase) or isinstance(rest, MatrixBase):
        return self.mat_mul_flat(first, rest)
    fraction = _PROPER.fullmatch(factors[start + 1].getText()) if start == len(factors) - 2 else None
    if fraction is not None and _INTEGER.fullmatch(factors[start].getText()):
        above, below = (int(group) for group in fraction.groups() if group is not None)
        if 0 < above < below:
            return Rational(int(factors[start].getText()) * below + above, below)
    return self.mul_flat(first, rest)


_library_product = _Latex2Sympy.convert_postfix_list
_Latex2Sympy.convert_postfix_list = _product


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
