"""A made-up task for small models with a database: a figure of an article, from a table that nobody has read before.

    price where id=481
    guessed   #### 57
    asked     <tool:query>SELECT price FROM stock WHERE id=481</tool>     the database says 57
              #### 57

Each question has a table of its own, so a guess is right by chance alone. Demonstrations of both kinds are right:
nothing but the outcome tells a policy which one works.
"""

from __future__ import annotations

import random
from typing import Any

from data_contracts.fields import ask
from data_contracts.generated import different_problems, rows_of_problems

TASK = "stock"
COLUMNS = ("id", "price", "count", "shelf", "weight", "age", "size", "rank", "pages")
_LOW, _HIGH = 10, 99
_NUM_ARTICLES = 12


def make_problem(rng: random.Random) -> str:
    """One question, such as ``price where id=481``."""
    return f"{rng.choice(COLUMNS[1:])} where id={rng.randint(100, 999)}"


def table(problem: str) -> list[tuple[int, ...]]:
    """The articles that a question is asked of, a row of ``COLUMNS`` each: the one that it names among others."""
    rng = random.Random(problem)
    others = {rng.randint(100, 999) for _ in range(_NUM_ARTICLES - 1)}
    articles = sorted(others | {_parts(problem)[1]})
    return [(article, *(rng.randint(_LOW, _HIGH) for _ in COLUMNS[1:])) for article in articles]


def answer(problem: str) -> int:
    """The figure that the table has."""
    column, article = _parts(problem)
    (row,) = (row for row in table(problem) if row[0] == article)
    return row[COLUMNS.index(column)]


def call(problem: str) -> str:
    """The turn that asks the database."""
    column, article = _parts(problem)
    return f"<tool:query>SELECT {column} FROM stock WHERE id={article}</tool>"


def generate_prompts(rng: random.Random, *, num_train: int, num_eval: int) -> list[dict[str, Any]]:
    """Rows of ``prompts/v1``, all questions different, train and evaluation from disjoint sets of questions."""

    def row(problem: str) -> dict[str, Any]:
        return {"prompt_id": _name(problem), "reference": str(answer(problem)), "task": TASK}

    return rows_of_problems(different_problems(make_problem, rng), row, num_train=num_train, num_eval=num_eval)


def generate_demonstrations(
    rng: random.Random, *, num_train: int, num_eval: int, direct_share: float
) -> list[dict[str, Any]]:
    """Rows of ``demonstrations/v1``; ``direct_share`` of them answer at once, the others ask the database first."""

    def row(problem: str) -> dict[str, Any]:
        said = str(answer(problem))
        turns = [{"role": "assistant", "content": call(problem)}, {"role": "tool", "content": said}]
        return {
            "demonstration_id": _name(problem),
            "messages": ask(problem) + ([] if rng.random() < direct_share else turns),
            "completion": f"#### {said}",
            "reference": said,
            "task": TASK,
        }

    return rows_of_problems(different_problems(make_problem, rng), row, num_train=num_train, num_eval=num_eval)


def _parts(problem: str) -> tuple[str, int]:
    column, _, article = problem.partition(" where id=")
    return column, int(article)


def _name(problem: str) -> str:
    column, article = _parts(problem)
    return f"{TASK}-{column}-{article}"
