"""Rows of generated problems: distinct problems, with splits decided by the prompt alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

from rlcore.data_contracts.adapters.fields import single_question
from rlcore.data_contracts.gate.splits import is_held_out
from rlcore.data_contracts.text import prompt_hash

_MAX_MISSES = 10_000


def rows_of_problems(
    problems: Iterator[str], row: Callable[[str], dict[str, Any]], *, num_train: int, num_eval: int
) -> list[dict[str, Any]]:
    """Return a row for each of ``num_train + num_eval`` problems, with conversation and split.

    ``row`` returns the other columns, and may return its own ``messages``.
    """
    missing = {"train": num_train, "eval": num_eval}
    rows = []
    for problem in problems:
        split = "eval" if is_held_out(prompt_hash(single_question(problem))) else "train"
        if missing[split]:
            missing[split] -= 1
            rows.append({"messages": single_question(problem), **row(problem), "split": split})
        if not any(missing.values()):
            break
    return rows


def unique_problems(make_problem: Callable[[random.Random], str], rng: random.Random) -> Iterator[str]:
    """Yield distinct problems until new ones become rare."""
    seen: set[str] = set()
    misses = 0
    while misses < _MAX_MISSES:
        problem = make_problem(rng)
        misses = misses + 1 if problem in seen else 0
        if misses == 0:
            seen.add(problem)
            yield problem
