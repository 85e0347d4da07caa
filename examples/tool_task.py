"""Generated task with a tool: questions, and demonstrations that answer directly or call the tool first."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rlcore.data_contracts.adapters.expressions import Kind
from rlcore.data_contracts.adapters.fields import single_question
from rlcore.data_contracts.adapters.table import Generator, Option
from rlcore.examples.generated import rows_of_problems, unique_problems


@dataclass(frozen=True, kw_only=True)
class ToolTask:
    """Task with a tool.

    Attributes:
        call: Returns the turn that calls the tool.
        guess: Returns the direct answer, without the tool.
        answered: Returns the turn after the tool output.
    """

    name: str
    make_problem: Callable[[random.Random], str]
    problem_id: Callable[[str], str]
    answer: Callable[[str], int]
    call: Callable[[str], str]
    tool_output: Callable[[str], str]
    guess: Callable[[str], str]
    answered: Callable[[str], str]

    def prompts(self, rng: random.Random, *, num_train: int, num_eval: int) -> list[dict[str, Any]]:
        """Return rows of ``prompts/v1`` with distinct questions; train and evaluation sets are disjoint."""
        problems = unique_problems(self.make_problem, rng)
        return rows_of_problems(
            problems,
            lambda problem: {"prompt_id": self.problem_id(problem), **self._known(problem)},
            num_train=num_train,
            num_eval=num_eval,
        )

    def demonstrations(
        self, rng: random.Random, *, num_train: int, num_eval: int, direct_share: float
    ) -> list[dict[str, Any]]:
        """Return rows of ``demonstrations/v1``; a fraction ``direct_share`` answers directly, others call the tool."""

        def row(problem: str) -> dict[str, Any]:
            is_direct = rng.random() < direct_share
            return {
                "demonstration_id": self.problem_id(problem),
                "messages": single_question(problem) + ([] if is_direct else self._turns(problem)),
                "completion": (self.guess if is_direct else self.answered)(problem),
                **self._known(problem),
            }

        problems = unique_problems(self.make_problem, rng)
        return rows_of_problems(problems, row, num_train=num_train, num_eval=num_eval)

    def generators(self, *, direct_share: float) -> dict[Kind, Generator]:
        """Return the generators of both kinds of rows; ``direct_share``: default."""
        options = {"direct_share": Option(default=direct_share, low=0.0, high=1.0)}
        return {
            "prompts": Generator(make=self.prompts),
            "demonstrations": Generator(make=self.demonstrations, options=options),
        }

    def _known(self, problem: str) -> dict[str, str]:
        return {"reference": str(self.answer(problem)), "task": self.name}

    def _turns(self, problem: str) -> list[dict[str, str]]:
        return [
            {"role": "assistant", "content": self.call(problem)},
            {"role": "tool", "content": self.tool_output(problem)},
        ]
