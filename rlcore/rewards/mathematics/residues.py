"""Residues of rational numbers and functions modulo primes, which compare them without computing them."""

from __future__ import annotations

import hashlib
import random
from fractions import Fraction
from functools import lru_cache

from sympy import nextprime  # type: ignore[import-untyped]

from rlcore.rewards.mathematics.formula import Node
from rlcore.rewards.mathematics.numeric_values import UndefinedError, exact_rational, is_finite

_OPAQUE_END = "()"
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
        """Return the residue of a name."""
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
