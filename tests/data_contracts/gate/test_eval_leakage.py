"""Training prompts that are nearly a prompt which is evaluated on, or hold one in their history."""

from __future__ import annotations

from typing import Any

import pytest

from rlcore.data_contracts.gate.eval_leakage import MAX_NEAR
from tests.data_contracts.gate.gating import Gated, gate_rows

LIMITS: dict[str, Any] = {"max_tokens": 60, "max_quarantined": 1.0}
COWS = "A farmer has 12 cows and sells 5 of them"


def ask(*turns: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[place % 2], "content": turn} for place, turn in enumerate(turns)]


def prompt(name: str, *turns: str, **changes: Any) -> dict[str, Any]:
    return {"prompt_id": name, "messages": ask(*turns), "reference": "7", "task": "t", **changes}


def others(**changes: Any) -> list[dict[str, Any]]:
    names = ["Paris", "London", "Rome", "Madrid", "Vienna", "Oslo"]
    return [prompt(name, f"Tell me about {name} and the people of {name}", **changes) for name in names]


def apart(result: Gated) -> float:
    (rule,) = [one for one in result.report.rules if one.name == "eval_prompts_are_apart"]
    return rule.value


def test_a_row_that_is_near_is_quarantined_where_the_source_divides_its_rows_and_says_near_what() -> None:
    rows = [*others(split="train"), prompt("near", f"Well {COWS}", split="train"), prompt("held", COWS, split="eval")]
    result = gate_rows(rows, "prompts", **LIMITS)
    (bad,) = result.quarantine
    assert (bad.origin.line, bad.field, bad.reason) == (7, "messages", "is nearly a prompt that is evaluated on")
    assert bad.excerpt == f"'Well {COWS}' and '{COWS}' in line 8"
    assert apart(result) == 1.0
    assert not gate_rows(rows, "prompts", keeps_apart=False, **LIMITS).quarantine


def test_all_rows_of_a_prompt_that_is_near_go() -> None:
    near = [prompt(f"n{place}", text, split="train") for place, text in enumerate([f"Well {COWS}", f"well, {COWS}?"])]
    result = gate_rows([*others(split="train"), *near, prompt("held", COWS, split="eval")], "prompts", **LIMITS)
    assert [one.origin.line for one in result.quarantine] == [7, 8]


def test_a_row_that_is_near_is_held_out_where_we_divide() -> None:
    for place in range(7):
        rows = others()
        rows.insert(place, prompt("near", f"Well {COWS}"))
        result = gate_rows(rows, "prompts", evaluated=[ask(COWS)], **LIMITS)
        assert not result.quarantine
        assert apart(result) == 1.0
        assert result.kept.set_index("prompt_id").loc["near", "split"] == "eval"


def test_a_question_in_a_history_is_found_by_its_own_key_and_a_greeting_is_no_question() -> None:
    history = prompt("leak", COWS.upper(), "Seven.", "Are you sure?", split="train")
    result = gate_rows([*others(split="train"), history, prompt("held", COWS, split="eval")], "prompts", **LIMITS)
    (bad,) = result.quarantine
    assert bad.reason == "has an evaluation prompt in its history"
    greeting = prompt("fine", "Hi there", "Hello.", "Are you sure?", split="train")
    rows = [*others(split="train"), greeting, prompt("held", "Hi there!", split="eval")]
    assert not gate_rows(rows, "prompts", **LIMITS).quarantine


def test_a_conversation_in_a_history_is_found_as_a_whole_and_its_last_turn_alone_is_no_question() -> None:
    asked = (COWS, "Seven.", "And how many legs are these?")
    longer = prompt("leak", *asked, "28.", "Are you sure?", split="train")
    other = prompt("fine", "A horse has 3 sisters", "Good.", asked[-1], "16.", "Are you sure?", split="train")
    held = prompt("held", *asked, split="eval")
    result = gate_rows([*others(split="train"), longer, other, held], "prompts", **LIMITS)
    (bad,) = result.quarantine
    assert (bad.origin.line, bad.reason) == (7, "has an evaluation prompt in its history")


@pytest.mark.parametrize("number", [MAX_NEAR, MAX_NEAR + 1])
def test_a_prompt_that_many_are_near_is_a_template_and_the_report_warns(number: int) -> None:
    words = ["red", "blue", "green", "brown", "grey", "pink", "white", "black", "orange"]
    near = [prompt(word, f"A farmer has {word} cows and sells them all", split="train") for word in words[:number]]
    rows = [*near, *others(split="train"), prompt("held", "A farmer has cows and sells them all", split="eval")]
    result = gate_rows(rows, "prompts", **LIMITS)
    is_template = number > MAX_NEAR
    assert len(result.quarantine) == (0 if is_template else number)
    warnings = " ".join(result.report.warnings)
    assert ("1 prompts that are evaluated on are like many others" in warnings) is is_template


def test_rows_that_are_refused_are_compared_with_nothing() -> None:
    rows = [*others(split="train"), prompt("near", f"Well {COWS}", split="train")]
    result = gate_rows([*rows, prompt("held", COWS, split="eval", task="")], "prompts", **LIMITS)
    assert [one.reason for one in result.quarantine] == ["must not be blank"]


def test_a_refusal_for_rows_that_are_near_says_what_to_set_where_they_are_not() -> None:
    rows = [*others(split="train"), prompt("near", f"Well {COWS}", split="train"), prompt("held", COWS, split="eval")]
    (fault,) = gate_rows(rows, "prompts", max_tokens=60, max_quarantined=0.0).report.errors
    assert fault.endswith("(where they are different questions, set near_duplicates = 'ignore')")
