"""Detection of unevaluated operations: those that an answer has and the reference does not."""

from __future__ import annotations

import re

from rlcore.rewards.mathematics.spelling import canonical

# Operations allowed only if the reference has them: named operations, derivatives, factorials.
_OPERATION = re.compile(
    r"\\(?:i{0,3}int|oint|sum|prod|lim(?:sup|inf)?|cap|gcd|det|max|min|[dt]?binom|[pb]?mod|ldots)(?![a-z])|!|'"
    r"|(?<![A-Za-z\\])(?:gcd|lcm|lim|int|integral|sum|prod|det|binom|mod|diff|derivative|expand|factor|simplify|solve)"
    r"(?![A-Za-z])"
    r"|\\frac ?\{ ?(?:d|\\partial)[^{}]{0,40}\} ?\{ ?(?:d|\\partial) ?(?:[A-Za-z]|\\[a-z]+)(?: ?\^[^{}]{1,3})? ?\}"
    r"|(?<![A-Za-z])d ?/ ?d ?[A-Za-z](?![A-Za-z])"
)
# Unevaluated too if the reference is a constant: \sin 30^\circ for 1/2.
_FUNCTION = re.compile(
    r"\\?(?<![A-Za-z])(?:a(?:rc)?)?(?:sin|cos|tan|cot|sec|csc)h?(?![a-z])|\\?(?<![A-Za-z])(?:log|ln|lg|exp)(?![a-z])"
)
_INVERSE = re.compile(r"\\(?=(?:sin|cos|tan|cot|sec|csc)h? ?\^ ?\{ ?-1 ?\})")


def is_unevaluated(answer: str, reference: str) -> bool:
    """Return True if the answer has an operation that the reference does not."""
    answer, reference = canonical(answer), canonical(reference)
    left = [{_sort_of("".join(found.split())) for found in _OPERATION.findall(text)} for text in (answer, reference)]
    if left[0] - left[1]:
        return True
    is_constant = re.search(r"[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", reference)) is None
    return is_constant and bool(_sorts_of_functions(answer) - _sorts_of_functions(reference))


def _sort_of(operation: str) -> str:
    r"""Return the class of an operation: ``\\binom`` counts as ``!``, which can replace it."""
    return "!" if operation.endswith("binom") else "mod" if operation.endswith("mod") else operation


def _sorts_of_functions(text: str) -> set[str]:
    """Return the classes of functions: ``log``, ``exp``, ``sin`` for trigonometric ones, ``arc`` for their inverses."""
    found = {name.strip("\\") for name in _FUNCTION.findall(_INVERSE.sub("arc", text))}
    return {
        "log" if name in ("log", "ln", "lg") else "exp" if name == "exp" else "arc" if name[0] == "a" else "sin"
        for name in found
    }
