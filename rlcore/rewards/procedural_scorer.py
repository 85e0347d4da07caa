"""reasoning-gym's own scorers. Runs in a grader process; the only file that imports reasoning_gym."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from reasoning_gym.factory import get_score_answer_fn

# Some scorers hand the answer to eval, or to sympy's parser, which evals it with the builtins in reach. They see an
# answer only when it is made of these tokens: no attribute, no name longer than a letter but the functions, no call by
# name in a list. Any other answer to those tasks is wrong, an integral that is left to be done among them.
_EXPRESSION = re.compile(
    r"(?:(?<![A-Za-z])(?:a?(?:sin|cos|tan)|(?:sin|cos|tan)h|exp|log|sqrt|pi|[A-Za-z])(?![A-Za-z])"
    r"|[0-9]|\.(?=[0-9])|[-+*/()^ ])+"
)
_LIST = re.compile(r"[0-9A-Z_\-,'\"\[\]\s]*")
EVALUATED_ANSWERS = {
    "countdown": _EXPRESSION,
    "puzzle24": _EXPRESSION,
    "polynomial_multiplication": _EXPRESSION,
    "simple_integration": _EXPRESSION,
    "intermediate_integration": _EXPRESSION,
    "binary_matrix": _LIST,
    "n_queens": _LIST,
    "spiral_matrix": _LIST,
    "string_insertion": _LIST,
}


def warm_up() -> None:
    """Make one scorer, so that forked workers share what that imports."""
    _scorer("chain_sum")


def grade(request: dict[str, Any]) -> float:
    """The best score (0..1) of ``answers`` on ``entry``, a row of the generator ``dataset``, by its own scorer.

    Raises:
        ValueError: no such generator, or one that cannot be made without a configuration.
    """
    score = _scorer(request["dataset"])
    allowed = EVALUATED_ANSWERS.get(request["dataset"])
    answers = [answer for answer in request["answers"] if allowed is None or allowed.fullmatch(answer)]
    return max((float(score(answer, request["entry"])) for answer in answers), default=0.0)


@lru_cache(maxsize=32)
def _scorer(name: str) -> Any:
    return get_score_answer_fn(name)
