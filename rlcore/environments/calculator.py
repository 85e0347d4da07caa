"""Calculator: exact arithmetic on the syntax tree of an expression. Nothing is evaluated as Python.

``(1+2)*3/4`` gives ``2.25``, ``1/3`` gives ``1/3``, ``2**10`` gives ``1024``, ``0.1+0.2`` gives ``0.3``.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction

from rlcore.environments.base import ToolFailure, ToolOutput, error_output

MAX_CHARACTERS = 200
MAX_BITS = 2_048  # of numerator and denominator together, at every step
MAX_DECIMALS = 12  # a number with more decimals is written as a fraction: 1/3
_ALLOWED = re.compile(r"[0-9.+\-*/%() ]+")
_Operation = Callable[[Fraction, Fraction], Fraction]


class CalculatorTool:
    """``+ - * / // % **`` and brackets over exact rational numbers; see :func:`calculate`."""

    name = "calculator"
    describes = "Computes an expression of numbers, + - * / // % ** and brackets, exactly."

    def __call__(self, arguments: Sequence[str]) -> list[ToolOutput | ToolFailure]:
        """Return the value of each expression, or its error."""
        return [_answer(argument) for argument in arguments]


def calculate(expression: str) -> Fraction:
    """Return the exact value of an expression.

    Raises:
        ValueError: The text is not arithmetic, or is too long or too large.
        ZeroDivisionError: It divides by zero.
    """
    text = expression.strip()
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"an expression has at most {MAX_CHARACTERS} characters")
    if not _ALLOWED.fullmatch(text):
        raise ValueError("an expression is made of numbers, + - * / // % ** and brackets")
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, MemoryError) as error:  # the parser raises MemoryError for too many brackets
        raise ValueError("this is no whole expression") from error
    return _value(tree.body, text)


def write_number(value: Fraction) -> str:
    """Write an integer, a short exact decimal, or else a fraction in lowest terms."""
    if value.denominator == 1:
        return str(value.numerator)
    for num_decimals in range(1, MAX_DECIMALS + 1):
        scaled = value * 10**num_decimals
        if scaled.denominator == 1:
            whole, part = divmod(abs(scaled.numerator), 10**num_decimals)
            return f"{'-' if value < 0 else ''}{whole}.{part:0{num_decimals}d}"
    return f"{value.numerator}/{value.denominator}"


def _answer(argument: str) -> ToolOutput:
    try:
        return ToolOutput(text=write_number(calculate(argument)))
    except ZeroDivisionError:
        return error_output("division by zero")
    except ValueError as error:
        return error_output(str(error))


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or abs(exponent) > MAX_BITS:
        raise ValueError("an exponent is an integer, and not a large one")
    # The size of the result is checked before it is computed.
    if base not in (0, 1, -1) and _bits(base) * abs(exponent.numerator) > 2 * MAX_BITS:
        raise ValueError("the result is too large")
    return Fraction(base**exponent.numerator)


_BINARY: Mapping[type[ast.operator], _Operation] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda a, b: Fraction(math.floor(a / b)),
    ast.Mod: operator.mod,
    ast.Pow: _power,
}


def _value(node: ast.expr, text: str) -> Fraction:
    """Return the value of a node. A decimal is read from ``text``, because a float would be rounded."""
    match node:
        case ast.Constant():
            return Fraction(text[node.col_offset : node.end_col_offset])
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, text)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand, text)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            result = _BINARY[type(op)](_value(left, text), _value(right, text))
            if _bits(result) > MAX_BITS:
                raise ValueError("the result is too large")
            return result
    raise ValueError("an expression is made of numbers, + - * / // % ** and brackets")


def _bits(value: Fraction) -> int:
    return value.numerator.bit_length() + value.denominator.bit_length()
