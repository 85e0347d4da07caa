"""Scorers of reasoning-gym. Runs in a grader process; only this file imports reasoning_gym.

``OWN_CHECKS`` replaces scorers that accept wrong answers: ``0e0*(…)+24`` for a use of all numbers, any four numbers for
the given ones, any text for "True", and the first digit for all.
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

# Some scorers pass the answer, or fields of the row, to eval, or to sympy's parser, with all builtins. They receive
# a text only if it consists of these tokens: no attribute, no long name except the functions, no call by name in a
# list. Other answers to those tasks are wrong, including open integrals; rows with other fields are refused.
_EXPRESSION = re.compile(
    r"(?:(?<![A-Za-z])(?:a?(?:sin|cos|tan)|(?:sin|cos|tan)h|exp|log|sqrt|pi|[A-Za-z])(?![A-Za-z])"
    r"|[0-9]|\.(?=[0-9])|[-+*/()^ ])+"
)
_FOUR_OPERATIONS = re.compile(r"(?!.*(?:\*\s*\*|/\s*/))[-+*/() 0-9]+")
_COMPLEX = re.compile(r"[-+0-9.eij() ]+", re.IGNORECASE)  # excludes "nan", which is close to everything
_ONE_NUMBER = re.compile(r"[^0-9]*[0-9]+(?:\.[0-9]+)?[^0-9]*")  # the scorer reads the first of several
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
    """Return True if four operations on all given numbers, each used once, give the target (default 24)."""
    metadata = entry["metadata"]
    numbers = sorted(map(int, re.findall(r"[0-9]+", answer)))
    try:
        return numbers == sorted(metadata["numbers"]) and calculate(answer) == metadata.get("target", 24)
    except (ValueError, ZeroDivisionError, RecursionError):
        return False


def _same_truth(answer: str, entry: Mapping[str, Any]) -> bool:
    return answer.strip().lower() == str(entry["answer"]).lower()


def _same_probability(answer: str, entry: Mapping[str, Any]) -> bool:
    """Return True if a decimal or a fraction is correct to four decimal places and two digits."""
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
_OTHER_ANSWERS = {"complex_arithmetic": _COMPLEX, "gsm_symbolic": _ONE_NUMBER}


def warm_up() -> None:
    """Create one scorer, so that forked workers share its imports."""
    _scorer("chain_sum")


def grade(request: dict[str, Any]) -> float:
    """Return the best score (0..1) of ``answers`` on ``entry``, a row of the generator ``dataset``.

    Raises:
        ValueError: The generator is unknown or needs a configuration, or its scorer would execute a field of the entry.
    """
    _refuse_code(request["dataset"], request["entry"])
    score = OWN_CHECKS.get(request["dataset"]) or _scorer(request["dataset"])
    allowed = (EVALUATED_ANSWERS | _OTHER_ANSWERS).get(request["dataset"])
    answers = [answer for answer in request["answers"] if allowed is None or allowed.fullmatch(answer)]
    try:
        return max((float(score(answer, request["entry"])) for answer in answers), default=0.0)
    except Exception:  # noqa: BLE001 - an answer that breaks a scorer is wrong
        oracle = request["entry"]["answer"]
        if allowed is None or allowed.fullmatch(oracle):
            score(oracle, request["entry"])  # if this raises too, the row is invalid
        return 0.0


def _refuse_code(dataset: str, entry: dict[str, Any]) -> None:
    for path, allowed in EVALUATED_FIELDS.get(dataset, {}).items():
        text: Any = entry
        for name in path.split("."):
            text = text.get(name) if isinstance(text, dict) else None
        if not isinstance(text, str) or not allowed.fullmatch(text):
            raise ValueError(f"{dataset} runs the entry's {path} as code, but {str(text)[:80]!r} is not only a formula")


@lru_cache(maxsize=32)
def _scorer(name: str) -> Any:
    return get_score_answer_fn(name)
