"""Value of a formula at a point: exact for a rational number of moderate size, else to a precision."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from types import MappingProxyType
from typing import Any

import mpmath  # type: ignore[import-untyped]

from rlcore.rewards.mathematics.formula import Node

_MAX_EXACT_BITS = 20_000
_MAX_EXACT_FACTORIAL = 1_000
_MAX_TERMS = 400  # of a sum
Point = Mapping[str, Fraction]


class UndefinedError(ArithmeticError):
    """Undefined value: a division by zero, ``0^0``, a root or logarithm outside of its domain."""


def exact_rational(node: Node) -> Fraction | None:
    """Return the value of a constant if it is a rational number of moderate size; None for anything else.

    Raises:
        UndefinedError: A division by zero, or 0^0.
    """
    if node.kind == "number":
        return Fraction(node.value)
    if node.kind in ("add", "mul"):
        found: Fraction = Fraction(int(node.kind == "mul"))
        for part in map(exact_rational, node.args):
            if part is None:
                return None
            found = found + part if node.kind == "add" else found * part
            if found.numerator.bit_length() + found.denominator.bit_length() > _MAX_EXACT_BITS:
                return None
        return found
    if node.kind == "pow":
        return _exact_power(exact_rational(node.args[0]), exact_rational(node.args[1]))
    if node.value == "factorial":
        count = exact_rational(node.args[0])
        is_small = count is not None and count.denominator == 1 and 0 <= count <= _MAX_EXACT_FACTORIAL
        return Fraction(math.factorial(int(count))) if is_small and count is not None else None
    return None


def _exact_power(base: Fraction | None, exponent: Fraction | None) -> Fraction | None:
    if base is None or exponent is None or exponent.denominator != 1:
        return None
    if base == 0 and exponent <= 0:
        raise UndefinedError
    size = base.numerator.bit_length() + base.denominator.bit_length()
    return base ** int(exponent) if abs(exponent) * size <= _MAX_EXACT_BITS else None


def log2_sizes(node: Node, point: Point, *, real: bool) -> int:
    """Return the largest ``|log2 |value||`` of all parts of a formula at a point, rounded up.

    Raises:
        UndefinedError: It has no value there.
    """
    sizes = [1]
    with mpmath.workprec(80):
        _value(node, point, real, sizes.append)
    return max(sizes)


def evaluate(node: Node, point: Point, *, precision: int, real: bool) -> Any:
    """Return the value at a point to ``precision`` bits. With ``real``, even roots of negative numbers are undefined.

    Raises:
        UndefinedError: It has no value there.
    """
    with mpmath.workprec(precision):
        return _value(node, point, real, lambda _: None)


def _value(node: Node, point: Point, real: bool, note: Callable[[int], None]) -> Any:
    try:
        found = _evaluated(node, point, real, note)
    except (ZeroDivisionError, ValueError, OverflowError, TypeError, KeyError) as error:
        raise UndefinedError from error
    if not mpmath.isfinite(found):
        raise UndefinedError
    if isinstance(found, mpmath.mpc) and found.imag == 0:
        found = found.real
    if real and isinstance(found, mpmath.mpc):
        raise UndefinedError
    if found != 0:
        note(abs(int(mpmath.mag(found))))
    return found


def _evaluated(node: Node, point: Point, real: bool, note: Callable[[int], None]) -> Any:
    if node.kind == "number":
        value = Fraction(node.value)
        return mpmath.mpf(value.numerator) / value.denominator
    if node.kind == "symbol":
        value = point[str(node.value)]
        return mpmath.mpf(value.numerator) / value.denominator
    if node.kind == "constant":
        return _CONSTANTS[str(node.value)]()
    if node.kind == "big":
        return _over_all(node, point, real, note) if is_finite(node) else _opaque(node, [repr(node.args)])
    if node.kind == "pow":
        return _power(node, point, real, note)
    values = [_value(argument, point, real, note) for argument in node.args]
    if node.kind == "add":
        return mpmath.fsum(values)
    if node.kind == "mul":
        return mpmath.fprod(values)
    name = str(node.value)
    if name.endswith("()"):
        return _opaque(node, [mpmath.nstr(value, 20) for value in values])
    if name not in _CALLS:
        raise UndefinedError
    return _CALLS[name](*values)


def _power(node: Node, point: Point, real: bool, note: Callable[[int], None]) -> Any:
    base, exponent = _value(node.args[0], point, real, note), exact_rational(node.args[1])
    if exponent is None:
        high = _value(node.args[1], point, real, note)
        whole = int(mpmath.nint(high)) if not isinstance(high, mpmath.mpc) and abs(high) < 2**40 else None
        exponent = Fraction(whole) if whole is not None and high == whole else None
        if exponent is None:
            if base == 0 or (real and base < 0):
                raise UndefinedError
            return base**high
    if base == 0:
        if exponent <= 0:
            raise UndefinedError
        return mpmath.mpf(0)
    if exponent.denominator == 1:
        return base ** int(exponent)
    power = mpmath.mpf(exponent.numerator) / exponent.denominator
    if real and base < 0:
        if exponent.denominator % 2 == 0:
            raise UndefinedError
        return (-1) ** exponent.numerator * (-base) ** power
    return base**power


def is_finite(node: Node) -> bool:
    r"""Return True for a sum or product with bounds: ``\sum_{k=1}^n``."""
    return node.kind == "big" and len(node.args) == 3


def _over_all(node: Node, point: Point, real: bool, note: Callable[[int], None]) -> Any:
    name, variable = str(node.value).split()
    low, high = (_whole(_value(bound, point, real, note)) for bound in node.args[1:])
    if high - low > _MAX_TERMS:
        raise UndefinedError
    values = [_value(node.args[0], {**point, variable: Fraction(k)}, real, note) for k in range(low, high + 1)]
    return mpmath.fsum(values) if name == "sum" else mpmath.fprod(values)


def _opaque(node: Node, arguments: list[str]) -> Any:
    digest = hashlib.sha256(f"{node.value}({','.join(arguments)})".encode()).digest()
    return 1 + mpmath.mpf(int.from_bytes(digest[:16], "big")) / 2**128


def _log(argument: Any, base: Any = None) -> Any:
    if argument == 0 or base == 1:
        raise UndefinedError
    return mpmath.log(argument) if base is None else mpmath.log(argument) / mpmath.log(base)


def _factorial(argument: Any) -> Any:
    if argument < 0 and argument == int(argument):
        raise UndefinedError
    return mpmath.factorial(argument)


_CONSTANTS: Mapping[str, Callable[[], Any]] = MappingProxyType(
    {"pi": lambda: +mpmath.pi, "e": lambda: +mpmath.e, "i": lambda: mpmath.mpc(0, 1)}
)
_SHORT = ("sin", "cos", "tan", "cot", "sec", "csc")
_CALLS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {f"{name}{h}": getattr(mpmath, f"{name}{h}") for name in _SHORT for h in ("", "h")}
    | {f"arc{name}{h}": getattr(mpmath, f"a{name}{h}") for name in _SHORT for h in ("", "h")}
    | {
        "ln": _log,
        "log": lambda argument, base=10: _log(argument, base),
        "lg": lambda argument: _log(argument, 10),
        "abs": abs,
        "floor": mpmath.floor,
        "ceil": mpmath.ceil,
        "factorial": _factorial,
        "binomial": mpmath.binomial,
        "max": max,
        "min": min,
        "gcd": lambda *values: mpmath.mpf(math.gcd(*map(_whole, values))),
        "lcm": lambda *values: mpmath.mpf(math.lcm(*map(_whole, values))),
        "sgn": mpmath.sign,
        "Re": mpmath.re,
        "Im": mpmath.im,
        "arg": mpmath.arg,
    }
)


def _whole(value: Any) -> int:
    if value != int(value):
        raise UndefinedError
    return int(value)
