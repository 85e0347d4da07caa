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
from data_contracts.splits import is_held_out
from data_contracts.text import prompt_hash

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
    """Rows of ``preference_pairs/v1``: a call of the calculator against a wrong guess."""

    def row(problem: str) -> dict[str, Any]:
        wrong = answer(problem) + rng.choice((-1, 1)) * rng.randint(1, 99)
        sides = {"chosen": call(problem), "rejected": guess(wrong), "margin": 0.0, "weight": 1.0, "source": TASK}
        return {"pair_id": f"{TASK}-{problem}", "messages": ask(problem), **sides}

    return _rows(rng, row, num_train=num_train, num_eval=num_eval)


def _rows(
    rng: random.Random, row: Callable[[str], dict[str, Any]], *, num_train: int, num_eval: int
) -> list[dict[str, Any]]:
    """A row for each of ``num_train + num_eval`` different problems, fewer where no more come up, with its split."""
    missing = {"train": num_train, "eval": num_eval}
    seen: set[str] = set()
    rows = []
    misses = 0
    while any(missing.values()) and misses < 10_000:
        problem = make_problem(rng)
        split = "eval" if is_held_out(prompt_hash(ask(problem))) else "train"
        misses += 1
        if problem not in seen and missing[split]:
            seen.add(problem)
            missing[split] -= 1
            misses = 0
            rows.append({**row(problem), "split": split})
    return rows
