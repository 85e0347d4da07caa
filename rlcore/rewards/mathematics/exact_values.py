r"""Equality of two formulas, decided exactly if they are rational or algebraic, whatever their size.

- **Rational numbers and functions** (``1-\frac{1}{50!}``, ``2^{2022}``, ``x(x+1)``) are compared modulo two random
  primes of 128 bits, seeded by both texts: nothing large is computed. Different residues prove a difference; equal ones
  are wrong with a probability below 2^-100.
- **Roots of these** (``2\sqrt2-2^{-2022}``): a nonzero difference has a known lower bound (Burnikel, Funke, Mehlhorn,
  Schirra and Schmitt, "A separation bound for real algebraic expressions", 2009). It is evaluated beyond that, up to
  ``_MAX_BITS``.
- **All others** (``\pi``, ``e``, logarithms, sines, powers of variables) are equal if they agree at random points, or
  as a number, to 400 bits more than four times the sizes of their parts.

Variables and all values are real: a root of a negative number is undefined, and ``\sqrt[3]{-8}`` is -2. With ``i`` in a
formula, or without any real value, principal complex values are used.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache

import mpmath  # type: ignore[import-untyped]
from sympy import nextprime  # type: ignore[import-untyped]

from rlcore.rewards.mathematics.formula import Node, difference, walk
from rlcore.rewards.mathematics.numeric_values import UndefinedError, evaluate, exact_rational, is_finite, log2_sizes

_OPAQUE_END = "()"
_MAX_BITS = 60_000
_BITS_BEYOND = 400
_ENOUGH = 3  # required points at which both have a value


def equal_values(reference: Node, answer: Node) -> bool:
    """Return True if two formulas are equal as functions of their variables. An undefined answer is not equal.

    Raises:
        UndefinedError: The reference has no value (``1/0``).
    """
    _require_value(reference)
    if reference == answer:
        return True
    names = free_symbols(reference) | free_symbols(answer)
    if is_infinite(reference) or is_infinite(answer):
        return _signed_infinity(reference) == _signed_infinity(answer) != 0
    seed = random.Random(hashlib.sha256(repr((reference, answer)).encode()).digest())
    try:
        return equal_residues(reference, answer, seed)
    except NotRationalError:
        pass
    except UndefinedError:
        return False
    if not names and not _has_opaque(reference) and not _has_opaque(answer):
        return _equal_numbers(reference, answer)
    return _equal_functions(reference, answer, sorted(names), seed)


def free_symbols(node: Node) -> frozenset[str]:
    """Return the names of the variables that are not bound by sums, integrals and the like."""
    if node.kind == "symbol":
        return frozenset((str(node.value),))
    if is_finite(node):
        body, *bounds = map(free_symbols, node.args)
        return frozenset(body - {str(node.value).split()[1]}).union(*bounds)
    if node.kind == "big":
        return frozenset()
    return frozenset().union(*map(free_symbols, node.args)) if node.args else frozenset()


def _require_value(node: Node) -> None:
    for part in walk(node):
        if part.kind == "pow":
            base, exponent = exact_rational(part.args[0]), exact_rational(part.args[1])
            if base == 0 and exponent is not None and exponent <= 0:
                raise UndefinedError


def is_infinite(node: Node) -> bool:
    """Return True if a formula contains infinity."""
    return any(part == Node("constant", "infinity") for part in walk(node))


def _signed_infinity(node: Node) -> int:
    if node == Node("constant", "infinity"):
        return 1
    if node.kind == "mul" and len(node.args) == 2 and node.args[0].kind == "number":
        return _signed_infinity(node.args[1]) * (1 if Fraction(node.args[0].value) > 0 else -1)
    return 0


def _has_opaque(node: Node) -> bool:
    return any(
        (part.kind == "big" and not is_finite(part)) or str(part.value).endswith(_OPAQUE_END) for part in walk(node)
    )


def _equal_numbers(reference: Node, answer: Node) -> bool:
    is_real = not any(_is_imaginary(node) for node in (reference, answer))
    for real in (True, False) if is_real else (False,):
        try:
            sizes = max(log2_sizes(reference, {}, real=real), log2_sizes(answer, {}, real=real))
            bits = _separation(difference(reference, answer)) or _BITS_BEYOND + 4 * sizes
            precision = bits + 2 * sizes + 128
            values = [evaluate(node, {}, precision=precision, real=real) for node in (reference, answer)]
        except UndefinedError:
            continue
        return _is_close(values, bits)
    return False


def _is_close(values: Sequence[object], bits: int) -> bool:
    with mpmath.workprec(bits + 64):
        return bool(mpmath.fabs(values[0] - values[1]) < mpmath.ldexp(1, -bits))  # type: ignore[operator]


def _is_imaginary(node: Node) -> bool:
    return any(part == Node("constant", "i") for part in walk(node))


def _separation(node: Node) -> int | None:
    """Return the bits that bound the magnitude of a nonzero algebraic number from below.

    None if the formula is not algebraic. ``u`` and ``l`` bound the conjugates of numerator and denominator, as
    logarithms; the degree is at most the product of those of the distinct roots.
    """
    roots: dict[Node, int] = {}
    try:
        upper, lower = _bounds(node, roots)
    except NotRationalError:
        return None
    degree = math.prod(roots.values())
    return min(math.ceil((degree - 1) * max(upper, 0.0) + lower) + degree + 8, _MAX_BITS)


def _bounds(node: Node, roots: dict[Node, int]) -> tuple[float, float]:
    if node.kind == "number":
        value = Fraction(node.value)
        return math.log2(max(abs(value.numerator), 1)), math.log2(value.denominator)
    if node == Node("constant", "i"):
        roots[node] = 2
        return 0.0, 0.0
    if node.kind == "add":
        parts = [_bounds(term, roots) for term in node.args]
        lower = sum(low for _, low in parts)
        return max(up + lower - low for up, low in parts) + math.log2(len(parts)), lower
    if node.kind == "mul":
        parts = [_bounds(factor, roots) for factor in node.args]
        return sum(up for up, _ in parts), sum(low for _, low in parts)
    if node.kind == "call" and node.value == "factorial":
        return math.lgamma(natural(node.args[0]) + 1) / math.log(2) + 1, 0.0
    if node.kind != "pow":
        raise NotRationalError
    exponent = exact_rational(node.args[1])
    if exponent is None:
        raise NotRationalError
    upper, lower = _bounds(node.args[0], roots)
    if exponent < 0:
        upper, lower = lower, upper
    root = exponent.denominator
    if root > 1:
        roots[node.args[0]] = math.lcm(roots.get(node.args[0], 1), root)
        high, low = max(upper, lower), min(upper, lower)
        mixed = (high + (root - 1) * low) / root  # (u l^(k-1))^(1/k) with u the larger
        upper, lower = (mixed, lower) if upper >= lower else (upper, (lower + (root - 1) * upper) / root)
    times = abs(exponent.numerator)
    return upper * times, lower * times


def _equal_functions(reference: Node, answer: Node, names: Sequence[str], seed: random.Random) -> bool:
    pair = (reference, answer)
    rounds: tuple[tuple[bool, Iterator[Mapping[str, Fraction]]], ...] = (
        (True, _points(names, seed)),
        (True, _naturals(names, seed)),
        (False, _points(names, seed)),
    )
    only_complex = any(map(_is_imaginary, pair))
    for real, points in rounds:
        if real and only_complex:
            continue
        verdict = _agree(pair, points, real=real)
        if verdict is not None:
            return verdict
    return False


def _agree(pair: tuple[Node, Node], points: Iterator[Mapping[str, Fraction]], *, real: bool) -> bool | None:
    r"""Return True if both have equal values wherever both are defined; None if that is at too few points.

    An absolute value on one side extends its domain: ``\ln|x|`` is not ``\ln x``.
    """
    absolute = [any(part.value == "abs" for part in walk(node)) for node in pair]
    agreed = 0
    for point in points:
        values, bits = _values_at(pair, point, real=real)
        if None in values:
            if values[0] is not values[1] and absolute[0] != absolute[1]:
                return False
            continue
        if not _is_close(values, bits):
            return False
        agreed += 1
    return True if agreed >= _ENOUGH else None


def _values_at(pair: tuple[Node, Node], point: Mapping[str, Fraction], *, real: bool) -> tuple[list[object], int]:
    sizes = 0
    for node in pair:
        try:
            sizes = max(sizes, log2_sizes(node, point, real=real))
        except UndefinedError:
            continue
    bits = _BITS_BEYOND + 4 * sizes
    values: list[object] = []
    for node in pair:
        try:
            values.append(evaluate(node, point, precision=bits + 2 * sizes + 128, real=real))
        except UndefinedError:
            values.append(None)
    return values, bits


def _points(names: Sequence[str], seed: random.Random) -> Iterator[Mapping[str, Fraction]]:
    for low, high, signs in ((0.05, 0.95, (1,)), (1.1, 5.0, (1,)), (0.1, 4.0, (1, -1)), (0.1, 4.0, (-1,))):
        for _ in range(2):
            yield {
                name: seed.choice(signs) * Fraction(seed.randint(int(low * 2**30), int(high * 2**30)), 2**30)
                for name in names
            }


def _naturals(names: Sequence[str], seed: random.Random) -> Iterator[Mapping[str, Fraction]]:
    for _ in range(6):
        yield {name: Fraction(seed.randint(2, 60)) for name in names}


_NUM_PRIMES, _PRIME_BITS = 2, 128


class NotRationalError(Exception):
    """Formula that is not a rational function."""


def constant_free_key(node: Node) -> int:
    """Return a number that constant multiples of a formula share; for roots, a hash of the spelling."""
    prime = (1 << 127) - 1
    try:
        first, second = (residue(node, prime, _Salt(salt)) for salt in ("first", "second"))
        return first * pow(second, -1, prime) % prime
    except (NotRationalError, UndefinedError, ValueError):
        return int.from_bytes(hashlib.sha256(repr(node).encode()).digest()[:15], "big")


def residue(node: Node, prime: int, salt: _Salt) -> int:
    """Return the value modulo a prime, with a random residue for each variable and undefined function.

    Raises:
        NotRationalError: The formula has a root, a sine, or a variable in an exponent.
        UndefinedError: A division by zero, or 0^0.
    """
    if node.kind == "number":
        return _quotient(Fraction(node.value), prime)
    if node.kind == "symbol":
        return salt.draw(str(node.value), prime)
    if node.kind == "add":
        return sum(residue(term, prime, salt) for term in node.args) % prime
    if node.kind == "mul":
        product = 1
        for factor in node.args:
            product = product * residue(factor, prime, salt) % prime
        return product
    if node.kind == "pow":
        return _power_residue(node, prime, salt)
    return _call_residue(node, prime, salt)


class _Salt:
    """Random residues by name, which depend on the salt."""

    def __init__(self, salt: str) -> None:
        self._salt = salt

    def draw(self, name: str, prime: int) -> int:
        return int.from_bytes(hashlib.sha256(f"{self._salt}:{name}".encode()).digest(), "big") % prime


def _power_residue(node: Node, prime: int, salt: _Salt) -> int:
    base, exponent = residue(node.args[0], prime, salt), exact_rational(node.args[1])
    if exponent is None or exponent.denominator != 1:
        raise NotRationalError
    if base == 0 and exponent <= 0:
        raise UndefinedError
    return pow(base, int(exponent), prime)


def _call_residue(node: Node, prime: int, salt: _Salt) -> int:
    if node.value == "factorial":
        return _factorial(natural(node.args[0]), prime)
    if node.value == "binomial":
        above, below = map(natural, node.args)
        if below > above:
            return 0
        divisor = _factorial(below, prime) * _factorial(above - below, prime)
        return _factorial(above, prime) * pow(divisor, -1, prime) % prime
    if (node.kind == "big" and not is_finite(node)) or str(node.value).endswith(_OPAQUE_END):
        arguments = ",".join(str(residue(argument, prime, salt)) for argument in node.args)
        return salt.draw(f"{node.value}({arguments})", prime)
    raise NotRationalError


def natural(node: Node) -> int:
    """Return the value of a constant that is a natural number.

    Raises:
        NotRationalError: It is not, or is unknown.
    """
    value = exact_rational(node)
    if value is None or value.denominator != 1 or value < 0:
        raise NotRationalError
    return int(value)


@lru_cache(maxsize=256)
def _factorial(count: int, prime: int) -> int:
    product = 1
    for factor in range(2, count + 1):
        product = product * factor % prime
    return product


def _quotient(value: Fraction, prime: int) -> int:
    return value.numerator * pow(value.denominator, -1, prime) % prime


def equal_residues(reference: Node, answer: Node, seed: random.Random) -> bool:
    """Return True if two rational functions are equal modulo random primes at random points.

    Raises:
        NotRationalError: One of them is not a rational function.
        UndefinedError: A division by zero, or 0^0.
    """
    for _ in range(_NUM_PRIMES):
        prime = int(nextprime(seed.getrandbits(_PRIME_BITS) | 1 << (_PRIME_BITS - 1)))
        salt = _Salt(str(seed.getrandbits(64)))
        if residue(reference, prime, salt) != residue(answer, prime, salt):
            return False
    return True
