"""The task for a calculator, and demonstrations that hold tool calls."""

from __future__ import annotations

import random

import pandas as pd
import pytest

from rlcore.data_contracts.adapters.fields import single_question
from rlcore.data_contracts.contracts import demonstrations
from rlcore.data_contracts.contracts.contract import require, violations
from rlcore.data_contracts.text import prompt_hash
from rlcore.examples import products

CALL = {"role": "assistant", "content": "<tool:calculator>3*4</tool>"}
SAID = {"role": "tool", "content": "12"}


def rows(direct_share: float, count: int = 40) -> list[dict[str, object]]:
    return products.MADE.demonstrations(random.Random(0), num_train=count, num_eval=4, direct_share=direct_share)


def test_a_called_demonstration_asks_the_calculator_and_repeats_it() -> None:
    assert products.answer("47*86") == 4042
    row = rows(0.0)[0]
    question, call, said = row["messages"]
    assert call == {"role": "assistant", "content": f"<tool:calculator>{question['content']}</tool>"}
    assert said == {"role": "tool", "content": str(products.answer(question["content"]))}
    assert row["completion"] == f"#### {said['content']}"
    assert row["reference"] == said["content"]


def test_pairs_prefer_a_call_to_a_wrong_guess() -> None:
    for pair in products.generate_pairs(random.Random(2), num_train=50, num_eval=5):
        problem = pair["messages"][0]["content"]
        assert pair["chosen"] == f"<tool:calculator>{problem}</tool>"
        assert pair["rejected"].removeprefix("#### ") != str(products.answer(problem))


def test_what_the_assistant_did_does_not_make_another_question() -> None:
    assert prompt_hash([*single_question("3*4"), CALL, SAID]) == prompt_hash(single_question("3*4"))
    assert prompt_hash([*single_question("3*4"), CALL, SAID, *single_question("3*4")]) != prompt_hash(
        single_question("3*4")
    )


def demonstration(messages: list[dict[str, str]]) -> pd.DataFrame:
    row = {"demonstration_id": "d", "completion": "#### 12", "reference": "12", "task": "t", "split": "train"}
    return pd.DataFrame([{**row, "messages": messages}], columns=list(demonstrations.CONTRACT.columns))


@pytest.mark.parametrize("num_calls", range(4))
def test_a_demonstration_may_call_tools_after_the_users_last_turn(num_calls: int) -> None:
    require(demonstration([*single_question("3*4"), *[CALL, SAID] * num_calls]), demonstrations.CONTRACT)


@pytest.mark.parametrize(
    "turns",
    [
        [CALL],
        [SAID],
        [SAID, CALL],
        [CALL, CALL, SAID],
        [CALL, SAID, SAID],
        [CALL, {"role": "tool", "content": " "}],
        [CALL, {"role": "system", "content": "12"}],
    ],
)
def test_turns_that_are_no_tool_calls_are_refused(turns: list[dict[str, str]]) -> None:
    (found,) = violations(demonstration([*single_question("3*4"), *turns]), demonstrations.CONTRACT)
    assert found.field == "messages"
