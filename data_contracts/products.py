"""A made-up task for small models with a calculator: the product of two numbers of two digits.

    47*86
    guessed   #### 4042
    called    <tool:calculator>47*86</tool>     the calculator says 4042
              #### 4042

A network of this size does not multiply in its head, so a guess is mostly wrong; to copy the problem into a call, and
the result into the answer, is easier. Demonstrations of both kinds are right: nothing but the outcome tells a policy
which one works.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from data_contracts.fields import ask
from data_contracts.generated import different_problems, rows_of_problems
from data_contracts.preference_pairs import single

TASK = "products"
LOW, HIGH = 10, 99


def make_problem(rng: random.Random) -> str:
    """One problem, such as ``47*86``."""
    return f"{rng.randint(LOW, HIGH)}*{rng.randint(LOW, HIGH)}"


def answer(problem: str) -> int:
    """The product."""
    first, second = problem.split("*")
    return int(first) * int(second)


def call(problem: str) -> str:
    """The turn that asks the calculator."""
    return f"<tool:calculator>{problem}</tool>"


def guess(number: int) -> str:
    """The turn that answers."""
    return f"#### {number}"


def generate_prompts(rng: random.Random, *, num_train: int, num_eval: int) -> list[dict[str, Any]]:
    """Rows of ``prompts/v1``, all problems different, train and evaluation from disjoint sets of problems."""

    def row(problem: str) -> dict[str, Any]:
        return {
            "prompt_id": f"{TASK}-{problem}",
            "messages": ask(problem),
            "reference": str(answer(problem)),
            "task": TASK,
        }

    return _rows(rng, row, num_train=num_train, num_eval=num_eval)


def generate_demonstrations(
    rng: random.Random, *, num_train: int, num_eval: int, direct_share: float
) -> list[dict[str, Any]]:
    """Rows of ``demonstrations/v1``; ``direct_share`` of them answer at once, the others call the calculator first."""

    def row(problem: str) -> dict[str, Any]:
        said = str(answer(problem))
        turns = [{"role": "assistant", "content": call(problem)}, {"role": "tool", "content": said}]
        return {
            "demonstration_id": f"{TASK}-{problem}",
            "messages": ask(problem) + ([] if rng.random() < direct_share else turns),
            "completion": guess(answer(problem)),
            "reference": said,
            "task": TASK,
        }

    return _rows(rng, row, num_train=num_train, num_eval=num_eval)


def generate_pairs(rng: random.Random, *, num_train: int, num_eval: int) -> list[dict[str, Any]]:
    """Rows of ``preference_pairs/v2``: a call of the calculator against a wrong guess."""

    def row(problem: str) -> dict[str, Any]:
        wrong = answer(problem) + rng.choice((-1, 1)) * rng.randint(1, 99)
        return {**single(f"{TASK}-{problem}"), "chosen": call(problem), "rejected": guess(wrong), "source": TASK}

    return _rows(rng, row, num_train=num_train, num_eval=num_eval)


def _rows(
    rng: random.Random, row: Callable[[str], dict[str, Any]], *, num_train: int, num_eval: int
) -> list[dict[str, Any]]:
    return rows_of_problems(different_problems(make_problem, rng), row, num_train=num_train, num_eval=num_eval)
