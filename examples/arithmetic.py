"""Generated task for small models: five one-digit terms, every running total between 0 and 9.

    4+3-6+7-2
    direct   #### 6
    worked   4+3=7;7-6=1;1+7=8;8-2=6;
             #### 6

A small network cannot state the answer directly, but can write it step by step, which a policy can discover. Every
worked solution has the same length, so a reward model cannot use it.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

from rlcore.data_contracts.adapters.table import Adapter, Generator, Option
from rlcore.data_contracts.contracts.datasets import single
from rlcore.examples.generated import rows_of_problems, unique_problems

NUM_TERMS = 5
MAX_TOTAL = 9
TASK = "arithmetic"
_TERM = re.compile(r"[+-]?\d")


def make_problem(rng: random.Random) -> str:
    """Return a random problem, such as ``4+3-6+7-2``."""
    total = rng.randint(1, MAX_TOTAL)
    text = str(total)
    for _ in range(NUM_TERMS - 1):
        step = rng.choice([step for step in range(-9, 10) if step and 0 <= total + step <= MAX_TOTAL])
        total += step
        text += f"{step:+d}"
    return text


def answer(problem: str) -> int:
    """Return the value of a problem."""
    return sum(_terms(problem))


def direct(problem: str) -> str:
    """Return only the answer: ``#### 6``."""
    return f"#### {answer(problem)}"


def worked(problem: str) -> str:
    """Return every running total, then the answer on its own line."""
    totals = _running_totals(problem)
    return _render(_terms(problem)[1:], totals, totals[-1])


def corrupted(problem: str, rng: random.Random) -> str:
    """Return a worked solution with correct steps and another digit as the answer."""
    totals = _running_totals(problem)
    final = rng.choice([final for final in range(MAX_TOTAL + 1) if final != totals[-1]])
    return _render(_terms(problem)[1:], totals, final)


def wrong_guess(problem: str, rng: random.Random) -> str:
    """Return only a wrong answer."""
    return f"#### {rng.choice([final for final in range(MAX_TOTAL + 1) if final != answer(problem)])}"


def generate_prompts(rng: random.Random, *, num_train: int, num_eval: int) -> list[dict[str, Any]]:
    """Return rows of ``prompts/v1`` with distinct problems; train and evaluation sets are disjoint."""

    def row(problem: str) -> dict[str, Any]:
        return {"prompt_id": f"{TASK}-{problem}", "reference": str(answer(problem)), "task": TASK}

    return _rows(rng, row, num_train=num_train, num_eval=num_eval)


def generate_demonstrations(
    rng: random.Random, *, num_train: int, num_eval: int, direct_share: float
) -> list[dict[str, Any]]:
    """Return rows of ``demonstrations/v1``; a fraction ``direct_share`` is direct, the others worked."""

    def row(problem: str) -> dict[str, Any]:
        completion = direct(problem) if rng.random() < direct_share else worked(problem)
        return {
            "demonstration_id": f"{TASK}-{problem}",
            "completion": completion,
            "reference": str(answer(problem)),
            "task": TASK,
        }

    return _rows(rng, row, num_train=num_train, num_eval=num_eval)


def generate_pairs(rng: random.Random, *, num_train: int, num_eval: int) -> list[dict[str, Any]]:
    """Return rows of ``preference_pairs/v2``: a correct worked solution and a wrong one.

    One in four wrong ones is direct, the others worked and equally long. Without the direct ones, a reward model would
    score them at random, which RL would exploit.
    """

    def row(problem: str) -> dict[str, Any]:
        wrong = corrupted(problem, rng) if rng.random() < 0.75 else wrong_guess(problem, rng)
        sides = {"chosen": worked(problem), "rejected": wrong}
        return {**single(f"{TASK}-{problem}"), **sides, "source": TASK}

    return _rows(rng, row, num_train=num_train, num_eval=num_eval)


def _rows(
    rng: random.Random, row: Callable[[str], dict[str, Any]], *, num_train: int, num_eval: int
) -> list[dict[str, Any]]:
    return rows_of_problems(unique_problems(make_problem, rng), row, num_train=num_train, num_eval=num_eval)


def _terms(problem: str) -> list[int]:
    return [int(term) for term in _TERM.findall(problem)]


def _running_totals(problem: str) -> list[int]:
    terms = _terms(problem)
    return [sum(terms[: index + 1]) for index in range(len(terms))]


def _render(steps: list[int], totals: list[int], final: int) -> str:
    written = (f"{before}{step:+d}={after};" for before, step, after in zip(totals, steps, totals[1:], strict=False))
    return f"{''.join(written)}\n#### {final}"


ADAPTER = Adapter(
    generators={
        "prompts": Generator(make=generate_prompts),
        "demonstrations": Generator(
            make=generate_demonstrations, options={"direct_share": Option(default=0.65, low=0.0, high=1.0)}
        ),
        "preferences": Generator(make=generate_pairs),
    }
)
