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
from typing import Any

from rlcore.data_contracts.adapters.table import Adapter, Generator
from rlcore.data_contracts.contracts.preference_pairs import single
from rlcore.examples.generated import rows_of_problems, unique_problems
from rlcore.examples.tool_task import ToolTask

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


def generate_pairs(rng: random.Random, *, num_train: int, num_eval: int) -> list[dict[str, Any]]:
    """Rows of ``preference_pairs/v2``: a call of the calculator against a wrong guess."""

    def row(problem: str) -> dict[str, Any]:
        wrong = answer(problem) + rng.choice((-1, 1)) * rng.randint(1, 99)
        return {**single(f"{TASK}-{problem}"), "chosen": call(problem), "rejected": guess(wrong), "source": TASK}

    return rows_of_problems(unique_problems(make_problem, rng), row, num_train=num_train, num_eval=num_eval)


MADE = ToolTask(
    name=TASK,
    make_problem=make_problem,
    problem_id=lambda problem: f"{TASK}-{problem}",
    answer=answer,
    call=call,
    said=lambda problem: str(answer(problem)),
    guess=lambda problem: guess(answer(problem)),
    answered=lambda problem: guess(answer(problem)),
)

ADAPTER = Adapter(
    generators={**MADE.generators(direct_share=0.7), "preferences": Generator(make=generate_pairs)},
)
