"""Generated task for small models with a search: a figure of a town, from a generated corpus.

    mills in Fasone?
    guessed    #### 32
    searched   <tool:search>Fasone</tool>     the search returns "Fasone: wells 22, mills 32, boats 20."
               mills 32 #### 32

Only the passages of ``towns.jsonl`` answer. Evaluation asks for figures that no training question has, so a guess is
correct only by chance. All demonstrations are correct, so a policy learns only from the outcome which kind works.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from functools import cache
from pathlib import Path

from rlcore.data_contracts.adapters.table import Adapter
from rlcore.data_contracts.errors import ContractError
from rlcore.examples.tool_task import ToolTask

TASK = "towns"
CORPUS = Path(__file__).with_name("towns.jsonl")
# In the code, so that cache keys change with the corpus.
CORPUS_SHA256 = "55dd77d5b40ac51d2897ac64cda6f4ee9e69d38ba28348904345a7c24f9f3518"
_FIGURE = re.compile(r"(\w+) (\d+)")


@cache
def passages() -> tuple[tuple[str, str], ...]:
    """Return (id, text) of every passage of the corpus, such as ``("t1", "Fasone: wells 22, mills 32, boats 20.")``.

    Raises:
        ContractError: The file does not match ``CORPUS_SHA256``.
    """
    content = CORPUS.read_bytes()
    if hashlib.sha256(content).hexdigest() != CORPUS_SHA256:
        raise ContractError("the corpus of towns was changed", where=str(CORPUS), fix="set CORPUS_SHA256 to its digest")
    rows = map(json.loads, content.decode().splitlines())
    return tuple((row["passage_id"], row["text"]) for row in rows)


def make_problem(rng: random.Random) -> str:
    """Return a random question, such as ``mills in Fasone?``."""
    town = rng.choice(list(_texts()))
    return f"{rng.choice(list(_figures(town)))} in {town}?"


def answer(problem: str) -> int:
    """Return the figure in the corpus."""
    figure, town = _parts(problem)
    return _figures(town)[figure]


def call(problem: str) -> str:
    """Return the turn that searches."""
    return f"<tool:search>{_parts(problem)[1]}</tool>"


@cache
def _texts() -> dict[str, str]:
    return {text.partition(":")[0]: text for _, text in passages()}


def _figures(town: str) -> dict[str, int]:
    return {name: int(number) for name, number in _FIGURE.findall(_texts()[town])}


def _parts(problem: str) -> tuple[str, str]:
    figure, _, town = problem.removesuffix("?").partition(" in ")
    return figure, town


def _problem_id(problem: str) -> str:
    figure, town = _parts(problem)
    return f"{TASK}-{figure}-{town}"


def _guess(problem: str) -> str:
    return f"#### {answer(problem)}"


def _answered(problem: str) -> str:
    """Name the figure first, as its passage does: that is easier to copy."""
    return f"{_parts(problem)[0]} {answer(problem)} {_guess(problem)}"


MADE = ToolTask(
    name=TASK,
    make_problem=make_problem,
    problem_id=_problem_id,
    answer=answer,
    call=call,
    tool_output=lambda problem: _texts()[_parts(problem)[1]],
    guess=_guess,
    answered=_answered,
)

ADAPTER = Adapter(generators=MADE.generators(direct_share=0.6))
