r"""Parser of formulas from LaTeX or plain mathematics to trees. Nothing is evaluated here.

The grammar is small and unambiguous: adjacent factors are multiplied (except ``1\frac{1}{2}``), ``e``, ``i`` and
``\pi`` are constants, ``f``, ``g``, ``F``, ``G`` and primed letters before a parenthesis are functions, and a subscript
is part of the name. Sums, integrals and the like stay unevaluated.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

from rlcore.rewards.mathematics.formula import FormulaError, Node, add, mul, negative, number, power, walk

_TOKEN = re.compile(r"\s+|\\[A-Za-z]+|\\.|[0-9]+(?:\.[0-9]+)?|\.[0-9]+|.", re.DOTALL)
_NUMBER = re.compile(r"\.?[0-9]")
TRIGONOMETRIC = frozenset(
    f"{prefix}{name}{h}"
    for prefix in ("", "arc")
    for name in ("sin", "cos", "tan", "cot", "sec", "csc")
    for h in ("", "h")
)
_FUNCTIONS = TRIGONOMETRIC | {"ln", "log", "lg", "arg", "Re", "Im", "sgn", "deg", "dim", "ker"}
_LISTED = frozenset(("max", "min", "gcd", "lcm", "det", "abs", "floor", "ceil"))
_GREEK = frozenset(
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma tau upsilon"  # noqa: SIM905 - a list of words
    " phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega ell hbar aleph".split()
)
_BIG = frozenset(("sum", "prod", "int", "iint", "iiint", "oint", "lim", "limsup", "liminf", "bigcup", "bigcap"))
_PAIRS = {"(": ")", "[": "]", "{": "}", "\\{": "\\}", "|": "|", "\\lfloor": "\\rfloor", "\\lceil": "\\rceil"}
_ACCENTS = frozenset(("overline", "bar", "hat", "tilde", "widehat", "widetilde", "dot", "ddot", "underline"))
_MAX_TOKENS = 1_500


@lru_cache(maxsize=1024)
def parse_formula(text: str) -> Node:
    """Parse a formula in canonical spelling (:mod:`rlcore.rewards.mathematics.spelling`).

    Raises:
        FormulaError: It is outside of the grammar.
    """
    tokens = [token for token in _TOKEN.findall(text) if not token.isspace() and token not in ("\\ ", "~")]
    if not tokens or len(tokens) > _MAX_TOKENS:
        raise FormulaError("empty or too long")
    reader = _Reader(tokens)
    node = reader.sum()
    if reader.next:
        raise FormulaError(f"unexpected {reader.next!r}")
    return node


class _Reader:
    """Recursive descent parser. ``stops`` are the brackets that close open ones."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self._tokens, self._position = tokens, 0
        self._bars = 0  # open |
        self._bound: frozenset[str] = frozenset()  # variables of sums

    @property
    def next(self) -> str:
        return self._tokens[self._position] if self._position < len(self._tokens) else ""

    def sum(self) -> Node:
        terms = [self._term()]
        while self.next in ("+", "-"):
            sign = self._take()
            term = self._term()
            terms.append(term if sign == "+" else negative(term))
        return add(*terms)

    def _take(self, wanted: str = "") -> str:
        token = self.next
        if not token or (wanted and token != wanted):
            raise FormulaError(f"expected {wanted or 'more'}, found {token!r}")
        self._position += 1
        return token

    def _term(self) -> Node:
        if self.next in ("+", "-"):
            sign = self._take()
            inner = self._term()
            return inner if sign == "+" else negative(inner)
        node = self._adjacent()
        while self.next in ("*", "/", ":"):
            operator = self._take()
            is_negative = False
            while self.next in ("+", "-"):
                is_negative ^= self._take() == "-"
            right = self._adjacent()
            right = negative(right) if is_negative else right
            node = mul(node, right if operator == "*" else power(right, number(-1)))
        return node

    def _adjacent(self) -> Node:
        start = self._position
        factors = [self._postfix()]
        while self._begins_factor():
            if _NUMBER.match(self.next) and _NUMBER.match(self._tokens[self._position - 1]):
                raise FormulaError("two adjacent numbers")
            factors.append(self._postfix())
        if len(factors) == 2 and (mixed := self._mixed(factors, self._tokens[start : self._position])) is not None:
            return mixed
        return mul(*factors)

    def _mixed(self, factors: Sequence[Node], tokens: Sequence[str]) -> Node | None:
        r"""Parse ``1\frac{1}{2}``: an integer before a fraction of two digits below one."""
        whole, part = factors
        if not tokens[0].isdecimal() or tokens[1] != "\\frac" or part.kind != "mul" or len(part.args) != 2:
            return None
        above, below = part.args[0], part.args[1].args[0] if part.args[1].kind == "pow" else None
        if below is None or above.kind != "number" or below.kind != "number":
            return None
        top, bottom = Fraction(above.value), Fraction(below.value)
        return number(Fraction(whole.value) + top / bottom) if 0 < top < bottom else None

    def _begins_factor(self) -> bool:
        token = self.next
        if not token or token in ")]}+-*/:^_!',;=<>&":
            return False
        if token == "|":
            return not self._bars
        return token not in ("\\}", "\\rfloor", "\\rceil", "\\|")

    def _postfix(self) -> Node:
        node = self._atom()
        while self.next in ("^", "!"):
            if self._take() == "!":
                if self.next == "!":
                    raise FormulaError("a double factorial")
                node = Node("call", "factorial", (node,))
            else:
                node = power(node, self._argument(whole_number=True))
        return node

    def _atom(self) -> Node:
        token = self._take()
        if _NUMBER.match(token):
            if self.next == "_":
                raise FormulaError("a number with a subscript")
            return number(Fraction(token))
        if token in ("(", "[", "{", "\\{", "|", "\\lfloor", "\\lceil"):
            return self._group(token)
        if token.isascii() and token.isalpha():
            return self._name(token)
        if token.startswith("\\"):
            return self._command(token[1:])
        raise FormulaError(f"unexpected {token!r}")

    def _group(self, opening: str) -> Node:
        if opening == "\\{":
            raise FormulaError("a set in a formula")
        bars, self._bars = self._bars, int(opening == "|")
        inner = self.sum()
        self._take(_PAIRS[opening])
        self._bars = bars
        calls = {"|": "abs", "\\lfloor": "floor", "\\lceil": "ceil"}
        return Node("call", calls[opening], (inner,)) if opening in calls else inner

    def _argument(self, *, whole_number: bool = False) -> Node:
        if self.next == "{":
            return self._group(self._take())
        if self.next == "-" and whole_number:  # x^-1
            self._take()
            return negative(self._argument(whole_number=True))
        if whole_number and self.next == "(":
            return self._group(self._take())
        if not whole_number and _NUMBER.match(self.next) and len(self.next) > 1:
            digit, rest = self.next[0], self.next[1:]
            self._tokens = [*self._tokens[: self._position], digit, rest, *self._tokens[self._position + 1 :]]
            self._take()
            return number(int(digit)) if digit.isdecimal() else self._fail("a decimal as an argument")
        return self._atom()

    def _fail(self, text: str) -> Node:
        raise FormulaError(text)

    def _raw(self) -> str:
        if self.next != "{":
            return self._take()
        self._take()
        depth, words = 1, []
        while depth:
            token = self._take()
            depth += (token == "{") - (token == "}")
            words.append(token)
        return " ".join(words[:-1])

    def _name(self, letters: str) -> Node:
        if letters in ("e", "i") and letters not in self._bound and self.next not in ("_", "'"):
            return Node("constant", letters)
        name = letters
        while self.next in ("_", "'"):
            name += self._take()
            if name.endswith("_"):
                name += "{" + self._raw().replace(" ", "") + "}"
        if self.next == "(" and (name[0] in "fgFG" or "'" in name):
            self._take()
            arguments = [self.sum()]
            while self.next == ",":
                self._take()
                arguments.append(self.sum())
            self._take(")")
            return Node("call", f"{name}()", tuple(arguments))
        return Node("symbol", name)

    def _command(self, name: str) -> Node:
        if name in ("pi", "infty"):
            return Node("constant", "pi" if name == "pi" else "infinity")
        readers = ((_FUNCTIONS, self._function), (_LISTED, self._listed), (_BIG, self._big))
        for names, read in readers:
            if name in names:
                return read(name)
        return self._name("\\" + name) if name in _GREEK else self._composed(name)

    def _composed(self, name: str) -> Node:
        if name == "frac":
            above, below = self._argument(), self._argument()
            return mul(above, power(below, number(-1)))
        if name == "sqrt":
            root = number(2)
            if self.next == "[":
                root = self._group(self._take())
            return power(self._argument(), power(root, number(-1)))
        if name == "binom":
            return Node("call", "binomial", (self._argument(), self._argument()))
        if name in _ACCENTS or name == "text":
            raw = self._raw()
            return self._name(raw if name == "text" and len(raw) == 1 else f"\\{name}{{{raw}}}")
        raise FormulaError(f"unknown command {name!r}")

    def _function(self, name: str) -> Node:
        base: tuple[Node, ...] = ()
        exponent = None
        while self.next in ("_", "^"):
            if self._take() == "_":
                base = (self._argument(whole_number=True),)
            else:
                exponent = self._argument(whole_number=True)
        argument = self._group(self._take()) if self.next in ("(", "{") else self._bare_argument()
        is_inverse = exponent == number(-1) and name in TRIGONOMETRIC
        node = Node("call", f"arc{name}" if is_inverse else name, (argument, *base))
        return node if exponent is None or is_inverse else power(node, exponent)

    def _bare_argument(self) -> Node:
        r"""Parse an argument up to an operator or another function: ``\sin 2x``, ``\sin x \cos x``."""
        if self.next == "-":
            self._take()
            return negative(self._bare_argument())
        factors = [self._postfix()]
        while self._begins_factor() and self.next.removeprefix("\\") not in _FUNCTIONS and self.next != "(":
            factors.append(self._postfix())
        return mul(*factors)

    def _listed(self, name: str) -> Node:
        opening = self._take()
        if opening not in ("(", "{", "\\{"):
            raise FormulaError(f"{name} without a list")
        arguments = [self.sum()]
        while self.next == ",":
            self._take()
            arguments.append(self.sum())
        self._take(_PAIRS[opening])
        return Node("call", name, tuple(arguments))

    def _big(self, name: str) -> Node:
        r"""Parse ``\sum_{k=1}^n``: body, first and last value of the variable; else bounds as text, and body."""
        bounds = ["", ""]
        while self.next in ("_", "^"):
            index = int(self._take() == "^")
            bounds[index] = self._raw().replace(" ", "")
        variable, _, low = bounds[0].partition("=")
        if name not in ("sum", "prod") or not variable.isalpha() or not low or not bounds[1] or "infty" in bounds[1]:
            return Node("big", f"{name}_{bounds[0]}^{bounds[1]}", (self._term(),))
        bound, self._bound = self._bound, self._bound | {variable}
        body = self._term()
        self._bound = bound
        if any(part.kind == "symbol" and variable in str(part.value)[1:] for part in walk(body)):  # a_i has no value
            return Node("big", f"{name}_{bounds[0]}^{bounds[1]}", (body,))
        return Node("big", f"{name} {variable}", (body, parse_formula(low), parse_formula(bounds[1])))
