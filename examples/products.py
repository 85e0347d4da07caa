"""Generated task for small models with a calculator: the product of two two-digit numbers.

    47*86
    guessed   #### 4042
    called    <tool:calculator>47*86</tool>     the calculator returns 4042
              #### 4042

Such a network cannot multiply, but can copy the problem into a call, and the result into the answer. All demonstrations
are correct, so a policy learns only from the outcome which kind works.
"""

from __future__ import annotations

import random
from typing import Any

from rlcore.data_contracts.adapters.table import Adapter, Generator
from rlcore.data_contracts.contracts.datasets import single
from rlcore.examples.generated import rows_of_problems, unique_problems
from rlcore.examples.tool_task import ToolTask

TASK = "products"
LOW, HIGH = 10, 99


def make_problem(rng: random.Random) -> str:
    """Return a random problem, such as ``47*86``."""
    return f"{rng.randint(LOW, HIGH)}*{rng.randint(LOW, HIGH)}"


def answer(problem: str) -> int:
    """Return the product."""
    first, second = problem.split("*")
    return int(first) * int(second)


def call(problem: str) -> str:
    """Return the turn that calls the calculator."""
    return f"<tool:calculator>{problem}</tool>"


def guess(number: int) -> str:
    """Return the turn with the answer."""
    return f"#### {number}"


def generate_pairs(rng: random.Random, *, num_train: int, num_eval: int) -> list[dict[str, Any]]:
    """Return rows of ``preference_pairs/v2``: a call of the calculator and a wrong guess."""

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
    tool_output=lambda problem: str(answer(problem)),
    guess=lambda problem: guess(answer(problem)),
    answered=lambda problem: guess(answer(problem)),
)

ADAPTER = Adapter(
    generators={**MADE.generators(direct_share=0.7), "preferences": Generator(make=generate_pairs)},
)
