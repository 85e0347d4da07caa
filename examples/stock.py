"""Generated task for small models with a database: a figure of an article, from a new table per question.

    price of 481
    guessed   #### 57
    called    <tool:query>SELECT price FROM stock WHERE id=481</tool>     the database returns 57
              #### 57

Each question has its own table, so a guess is correct only by chance. All demonstrations are correct, so a policy
learns only from the outcome which kind works.
"""

from __future__ import annotations

import random

from rlcore.data_contracts.adapters.table import Adapter
from rlcore.examples.tool_task import ToolTask

TASK = "stock"
COLUMNS = ("id", "price", "count", "shelf", "weight", "age", "size", "rank", "pages")
_LOW, _HIGH = 10, 99
_NUM_ARTICLES = 12


def make_problem(rng: random.Random) -> str:
    """Return a random question, such as ``price of 481``."""
    return f"{rng.choice(COLUMNS[1:])} of {rng.randint(100, 999)}"


def table(problem: str) -> list[tuple[int, ...]]:
    """Return the rows (``COLUMNS``) of a question's table, which contains its article."""
    rng = random.Random(problem)
    others = {rng.randint(100, 999) for _ in range(_NUM_ARTICLES - 1)}
    articles = sorted(others | {_parts(problem)[1]})
    return [(article, *(rng.randint(_LOW, _HIGH) for _ in COLUMNS[1:])) for article in articles]


def answer(problem: str) -> int:
    """Return the figure in the table."""
    column, article = _parts(problem)
    (row,) = (row for row in table(problem) if row[0] == article)
    return row[COLUMNS.index(column)]


def call(problem: str) -> str:
    """Return the turn that queries the database."""
    column, article = _parts(problem)
    return f"<tool:query>SELECT {column} FROM stock WHERE id={article}</tool>"


def _parts(problem: str) -> tuple[str, int]:
    column, _, article = problem.partition(" of ")
    return column, int(article)


def _problem_id(problem: str) -> str:
    column, article = _parts(problem)
    return f"{TASK}-{column}-{article}"


def _guess(problem: str) -> str:
    return f"#### {answer(problem)}"


MADE = ToolTask(
    name=TASK,
    make_problem=make_problem,
    problem_id=_problem_id,
    answer=answer,
    call=call,
    tool_output=lambda problem: str(answer(problem)),
    guess=_guess,
    answered=_guess,
)

ADAPTER = Adapter(generators=MADE.generators(direct_share=0.6))
