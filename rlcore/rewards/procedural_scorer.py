"""reasoning-gym's own scorers. Runs in a grader process; the only file that imports reasoning_gym.

Where a scorer pays what solves nothing, a check of ours stands in its place (``OWN_CHECKS``): it took ``0e0*(…)+24``
for a way to use all numbers, any four numbers for the given ones, any text for "True", and the first digit for all.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Any

from reasoning_gym.factory import get_score_answer_fn

from rlcore.environments.calculator import calculate

# Some scorers hand the answer, or fields of the row, to eval, or to sympy's parser, which evals them with the builtins
# in reach. They see a text only when it is made of these tokens: no attribute, no name longer than a letter but the
# functions, no call by name in a list. Any other answer to those tasks is wrong, an integral that is left to be done
# among them; a row with any other field is refused.
_EXPRESSION = re.compile(
    r"(?:(?<![A-Za-z])(?:a?(?:sin|cos|tan)|(?:sin|cos|tan)h|exp|log|sqrt|pi|[A-Za-z])(?![A-Za-z])"
    r"|[0-9]|\.(?=[0-9])|[-+*/()^ ])+"
)
_FOUR_OPERATIONS = re.compile(r"(?!.*(?:\*\s*\*|/\s*/))[-+*/() 0-9]+")
_COMPLEX = re.compile(r"[-+0-9.eij() ]+", re.IGNORECASE)  # "nan" is as near to everything as can be
_LIST = re.compile(r"[0-9A-Z_\-,'\"\[\]\s]*")
_NUMBERS = re.compile(r"[-+0-9.,'\"\[\]\s]*")
_BITS = re.compile(r"(?:0x[0-9a-fA-F]+|[0-9]+|<<|>>|[-+*() ])+")
_LETTER = re.compile(r"[A-Za-z]")
EVALUATED_ANSWERS = {
    "countdown": _FOUR_OPERATIONS,
    "puzzle24": _FOUR_OPERATIONS,
    "polynomial_multiplication": _EXPRESSION,
    "simple_integration": _EXPRESSION,
    "intermediate_integration": _EXPRESSION,
    "binary_matrix": _LIST,
    "n_queens": _LIST,
    "spiral_matrix": _LIST,
    "string_insertion": _LIST,
}

# By data set: the fields of a row that its scorer evaluates, by their path.
EVALUATED_FIELDS = {
    "bitwise_arithmetic": {"metadata.problem": _BITS},
    "intermediate_integration": {"metadata.integrand": _EXPRESSION, "metadata.variable": _LETTER},
    "number_sorting": {"answer": _NUMBERS},
    "polynomial_multiplication": {"answer": _EXPRESSION},
    "simple_integration": {"metadata.integrand": _EXPRESSION, "metadata.variable": _LETTER},
}


def _makes(answer: str, entry: Mapping[str, Any]) -> bool:
    """True if four operations on all the given numbers, each once, make the target (24 where there is none)."""
    metadata = entry["metadata"]
    numbers = sorted(map(int, re.findall(r"[0-9]+", answer)))
    try:
        return numbers == sorted(metadata["numbers"]) and calculate(answer) == metadata.get("target", 24)
    except (ValueError, ZeroDivisionError, RecursionError):
        return False


def _same_truth(answer: str, entry: Mapping[str, Any]) -> bool:
    return answer.strip().lower() == str(entry["answer"]).lower()


def _same_probability(answer: str, entry: Mapping[str, Any]) -> bool:
    """True if a decimal or a fraction is right to four places and two digits."""
    try:
        found, right = Fraction(answer.replace(",", "")), Fraction(entry["answer"])
        return math.isclose(found, right, rel_tol=0.01, abs_tol=0.0) and abs(found - right) <= Fraction(1, 10_000)
    except (ValueError, ZeroDivisionError, OverflowError):
        return False


OWN_CHECKS: Mapping[str, Callable[[str, Mapping[str, Any]], bool]] = {
    "countdown": _makes,
    "puzzle24": _makes,
    "game_of_life_halting": _same_truth,
    "coin_flip": _same_probability,
}
_OTHER_ANSWERS = {"complex_arithmetic": _COMPLEX}


def warm_up() -> None:
    """Make one scorer, so that forked workers share what that imports."""
    _scorer("chain_sum")


def grade(request: dict[str, Any]) -> float:
    """The best score (0..1) of ``answers`` on ``entry``, a row of the generator ``dataset``.

    Raises:
        ValueError: no such generator, one that cannot be made without a configuration, or a field of the entry that
            its scorer would run as code.
    """
    _refuse_code(request["dataset"], request["entry"])
    score = OWN_CHECKS.get(request["dataset"]) or _scorer(request["dataset"])
    allowed = (EVALUATED_ANSWERS | _OTHER_ANSWERS).get(request["dataset"])
    answers = [answer for answer in request["answers"] if allowed is None or allowed.fullmatch(answer)]
    try:
        return max((float(score(answer, request["entry"])) for answer in answers), default=0.0)
    except Exception:  # noqa: BLE001 - whatever an answer does to a scorer, it is no right one
        oracle = request["entry"]["answer"]
        if allowed is None or allowed.fullmatch(oracle):
            score(oracle, request["entry"])  # where this raises too, the row is at fault
        return 0.0


def _refuse_code(dataset: str, entry: dict[str, Any]) -> None:
    for path, allowed in EVALUATED_FIELDS.get(dataset, {}).items():
        text: Any = entry
        for name in path.split("."):
            text = text.get(name) if isinstance(text, dict) else None
        if not isinstance(text, str) or not allowed.fullmatch(text):
            raise ValueError(
                f"{dataset} runs the entry's {path} as code, and {str(text)[:80]!r} is more than a formula"
            )


@lru_cache(maxsize=32)
def _scorer(name: str) -> Any:
    return get_score_answer_fn(name)
