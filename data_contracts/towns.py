"""A made-up task for small models with a search: a figure of a town, from a corpus that we made up.

    mills in Fasone?
    guessed    #### 32
    searched   <tool:search>Fasone</tool>     the search says "Fasone: wells 22, mills 32, boats 20."
               mills 32 #### 32

The passages of ``towns.jsonl`` are the world: no question is answered by anything else. Questions that are held out ask
for figures that no training question asks for, so a guess is right by chance alone. Demonstrations of both kinds are
right: nothing but the outcome tells a policy which one works.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from functools import cache
from pathlib import Path
from typing import Any

from data_contracts.errors import ContractError
from data_contracts.fields import ask
from data_contracts.generated import different_problems, rows_of_problems

TASK = "towns"
CORPUS = Path(__file__).with_name("towns.jsonl")
# Part of the code, so that the keys of stages follow the corpus: another one makes other rows and other episodes.
CORPUS_SHA256 = "55dd77d5b40ac51d2897ac64cda6f4ee9e69d38ba28348904345a7c24f9f3518"
_FIGURE = re.compile(r"(\w+) (\d+)")


@cache
def passages() -> tuple[tuple[str, str], ...]:
    """(id, text) of every passage of the corpus, such as ``("t1", "Fasone: wells 22, mills 32, boats 20.")``.

    Raises:
        ContractError: the file is not the one that this code was written for.
    """
    content = CORPUS.read_bytes()
    if hashlib.sha256(content).hexdigest() != CORPUS_SHA256:
        raise ContractError("the corpus of towns was changed", where=str(CORPUS), fix="set CORPUS_SHA256 to its digest")
    rows = map(json.loads, content.decode().splitlines())
    return tuple((row["passage_id"], row["text"]) for row in rows)


def make_problem(rng: random.Random) -> str:
    """One question, such as ``mills in Fasone?``."""
    town = rng.choice(list(_texts()))
    return f"{rng.choice(list(_figures(town)))} in {town}?"


def answer(problem: str) -> int:
    """The figure that the corpus has."""
    figure, town = _parts(problem)
    return _figures(town)[figure]


def call(problem: str) -> str:
    """The turn that searches."""
    return f"<tool:search>{_parts(problem)[1]}</tool>"


def generate_prompts(rng: random.Random, *, num_train: int, num_eval: int) -> list[dict[str, Any]]:
    """Rows of ``prompts/v1``, all questions different, train and evaluation from disjoint sets of questions."""

    def row(problem: str) -> dict[str, Any]:
        return {"prompt_id": _name(problem), "reference": str(answer(problem)), "task": TASK}

    return rows_of_problems(different_problems(make_problem, rng), row, num_train=num_train, num_eval=num_eval)


def generate_demonstrations(
    rng: random.Random, *, num_train: int, num_eval: int, direct_share: float
) -> list[dict[str, Any]]:
    """Rows of ``demonstrations/v1``; ``direct_share`` of them answer at once, the others search first."""

    def row(problem: str) -> dict[str, Any]:
        said, (figure, town) = str(answer(problem)), _parts(problem)
        is_direct = rng.random() < direct_share
        turns = [{"role": "assistant", "content": call(problem)}, {"role": "tool", "content": _texts()[town]}]
        return {
            "demonstration_id": _name(problem),
            "messages": ask(problem) + ([] if is_direct else turns),
            "completion": f"#### {said}" if is_direct else f"{figure} {said} #### {said}",
            "reference": said,
            "task": TASK,
        }

    return rows_of_problems(different_problems(make_problem, rng), row, num_train=num_train, num_eval=num_eval)


@cache
def _texts() -> dict[str, str]:
    return {text.partition(":")[0]: text for _, text in passages()}


def _figures(town: str) -> dict[str, int]:
    return {name: int(number) for name, number in _FIGURE.findall(_texts()[town])}


def _parts(problem: str) -> tuple[str, str]:
    figure, _, town = problem.removesuffix("?").partition(" in ")
    return figure, town


def _name(problem: str) -> str:
    figure, town = _parts(problem)
    return f"{TASK}-{figure}-{town}"
