"""Made-up tasks with a tool: what holds of each of them."""

from __future__ import annotations

import random

import pytest

from rlcore.data_contracts.gate.splits import is_held_out
from rlcore.data_contracts.text import prompt_hash
from rlcore.examples import products, stock, towns
from rlcore.examples.tool_task import ToolTask

TASKS = [products.MADE, stock.MADE, towns.MADE]
all_tasks = pytest.mark.parametrize("task", TASKS, ids=[task.name for task in TASKS])


@all_tasks
def test_the_share_of_guesses_is_as_asked(task: ToolTask) -> None:
    for share in (0.0, 0.7, 1.0):
        made = task.demonstrations(random.Random(0), num_train=1000, num_eval=0, direct_share=share)
        lengths = [len(row["messages"]) for row in made]
        assert {*lengths} <= {1, 3}
        assert sum(length == 1 for length in lengths) / 1000 == pytest.approx(share, abs=0.05)


@all_tasks
def test_a_demonstration_says_what_the_tool_says_and_ends_with_the_answer(task: ToolTask) -> None:
    for row in task.demonstrations(random.Random(1), num_train=50, num_eval=5, direct_share=0.5):
        question, *turns = row["messages"]
        problem = question["content"]
        assert row["completion"].endswith(f"#### {task.answer(problem)}")
        assert row["reference"] == str(task.answer(problem))
        assert [turn["content"] for turn in turns] == [task.call(problem), task.tool_output(problem)][: len(turns)]


@all_tasks
def test_questions_are_different_and_held_out_by_their_words_alone(task: ToolTask) -> None:
    prompts = task.prompts(random.Random(1), num_train=200, num_eval=30)
    assert len({row["prompt_id"] for row in prompts}) == 230
    made = [*prompts, *task.demonstrations(random.Random(2), num_train=200, num_eval=20, direct_share=0.5)]
    assert all(is_held_out(prompt_hash(row["messages"])) == (row["split"] == "eval") for row in made)
