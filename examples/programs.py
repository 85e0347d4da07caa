"""Generated code task for small models: a function in words, to be written in Python, checked by hidden tests.

    add 3;from 5;times 2;mod 7
    stepwise    def f(x):
                 x+=3
                 x=5-x
                 x*=2
                 x%=7
                 return x
    nested      def f(x):
                 return ((5-(x+3))*2)%7

A nested expression begins with the last step, so a small network must plan; one statement per step is easier. Only the
tests show a policy which style works.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from rlcore.data_contracts.adapters.table import Adapter, Generator, Option
from rlcore.data_contracts.contracts import code_tasks
from rlcore.examples.generated import rows_of_problems, unique_problems

TASK = "programs"
NUM_STEPS = 4
NUM_TESTS = 6
_POINTS = range(-20, 21)
_STATEMENTS = {"add": "x+={}", "take": "x-={}", "times": "x*={}", "from": "x={}-x", "mod": "x%={}"}
_EXPRESSIONS = {"add": "{1}+{0}", "take": "{1}-{0}", "times": "{1}*{0}", "from": "{0}-{1}", "mod": "{1}%{0}"}


def make_problem(rng: random.Random) -> str:
    """Return a random problem, such as ``add 3;from 5;times 2;mod 7``, which no program that ignores x solves."""
    while True:
        steps = (f"{rng.choice(list(_STATEMENTS))} {rng.randint(2, 9)}" for _ in range(NUM_STEPS))
        problem = ";".join(steps)
        if len({value(problem, x) for x in _POINTS}) > 1:
            return problem


def value(problem: str, x: int) -> int:
    """Return the value of a problem's function at ``x``."""
    for verb, number in _steps(problem):
        match verb:
            case "add":
                x += number
            case "take":
                x -= number
            case "times":
                x *= number
            case "from":
                x = number - x
            case "mod":
                x %= number
    return x


def stepwise(problem: str) -> str:
    """Return the program with one statement per step."""
    lines = [_STATEMENTS[verb].format(number) for verb, number in _steps(problem)]
    return "\n ".join(["def f(x):", *lines, "return x"])


def nested(problem: str) -> str:
    """Return the program that is one expression."""
    inner = "x"
    for verb, number in _steps(problem):
        expression = _EXPRESSIONS[verb].format(number, inner)
        inner = f"({expression})"
    return f"def f(x):\n return {expression}"


def reference(problem: str, rng: random.Random) -> str:
    """Return hidden tests (``code_tasks/v1``) at points that differ between problems."""
    points = rng.sample(_POINTS, NUM_TESTS)
    while len({value(problem, x) for x in points}) == 1:
        points = rng.sample(_POINTS, NUM_TESTS)
    tests = [{"args": [x], "output": value(problem, x)} for x in points]
    return json.dumps({"style": "call", "entry_point": "f", "tests": tests, "solution": stepwise(problem)})


def generate_prompts(rng: random.Random, *, num_train: int, num_eval: int) -> list[dict[str, Any]]:
    """Return rows of ``code_tasks/v1`` with distinct problems; train and evaluation sets are disjoint."""

    def row(problem: str) -> dict[str, Any]:
        return {"prompt_id": f"{TASK}-{problem}", "reference": reference(problem, rng), "task": TASK}

    return _rows(rng, row, num_train=num_train, num_eval=num_eval)


def generate_demonstrations(
    rng: random.Random, *, num_train: int, num_eval: int, nested_share: float
) -> list[dict[str, Any]]:
    """Return rows of ``demonstrations/v1``; a fraction ``nested_share`` is nested, the others stepwise."""

    def row(problem: str) -> dict[str, Any]:
        return {
            "demonstration_id": f"{TASK}-{problem}",
            "completion": nested(problem) if rng.random() < nested_share else stepwise(problem),
            "reference": reference(problem, rng),
            "task": TASK,
        }

    return _rows(rng, row, num_train=num_train, num_eval=num_eval)


def _rows(
    rng: random.Random, row: Callable[[str], dict[str, Any]], *, num_train: int, num_eval: int
) -> list[dict[str, Any]]:
    return rows_of_problems(unique_problems(make_problem, rng), row, num_train=num_train, num_eval=num_eval)


def _steps(problem: str) -> list[tuple[str, int]]:
    return [(verb, int(number)) for verb, number in (step.split() for step in problem.split(";"))]


ADAPTER = Adapter(
    generators={
        "prompts": Generator(make=generate_prompts),
        "demonstrations": Generator(
            make=generate_demonstrations, options={"nested_share": Option(default=0.5, low=0.0, high=1.0)}
        ),
    },
    contracts={"prompts": code_tasks.CONTRACT},
)
