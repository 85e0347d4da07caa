from __future__ import annotations

import json
import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.data_contracts.adapters import procedural
from rlcore.data_contracts.errors import ContractError
from rlcore.data_contracts.gate.splits import is_held_out
from rlcore.data_contracts.text import prompt_hash


def test_a_sum_is_worked_with_running_totals() -> None:
    assert procedural.worked_sum("4 - 1 - 7") == "4 - 1 = 3\n3 - 7 = -4"
    assert procedural.worked_sum("5 - -2 + 10") == "5 - -2 = 7\n7 + 10 = 17"


@given(st.lists(st.integers(-9999, 9999), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_the_last_running_total_is_the_value_of_the_sum(terms: list[int], rng: random.Random) -> None:
    signs = [rng.choice((1, -1)) for _ in terms[1:]]
    expression = str(terms[0]) + "".join(f" {'+' if s > 0 else '-'} {t}" for s, t in zip(signs, terms[1:], strict=True))
    total = terms[0] + sum(s * t for s, t in zip(signs, terms[1:], strict=True))
    lines = procedural.worked_sum(expression).splitlines()
    assert len(lines) == len(terms) - 1
    assert not lines or int(lines[-1].split("= ")[1]) == total


@pytest.mark.parametrize("expression", ["4 * 2", "", "4 -", "(4 - 2)", "4 2"])
def test_what_is_no_sum_of_integers_is_refused(expression: str) -> None:
    with pytest.raises(ValueError, match="not a sum"):
        procedural.worked_sum(expression)


def test_prompts_are_different_divided_by_hash_and_scored_by_their_own_generator() -> None:
    from reasoning_gym.factory import get_score_answer_fn

    rows = procedural.generate_prompts(
        random.Random(3), num_train=30, num_eval=6, tasks="chain_sum, leg_counting", settings={}
    )
    assert [row["split"] for row in rows].count("eval") == 6
    assert {row["task"] for row in rows[:2]} == {"chain_sum", "leg_counting"}
    assert len({prompt_hash(row["messages"]) for row in rows}) == 36
    for row in rows:
        assert (row["split"] == "eval") == is_held_out(prompt_hash(row["messages"]))
        reference = json.loads(row["reference"])
        assert reference["dataset"] == row["task"]
        assert reference["entry"]["question"].strip() == row["messages"][0]["content"]
        assert get_score_answer_fn(row["task"])(reference["entry"]["answer"], reference["entry"]) == 1.0


def test_rows_are_a_function_of_the_generator_passed_in() -> None:
    def make(seed: int) -> list[dict[str, object]]:
        return procedural.generate_prompts(random.Random(seed), num_train=10, num_eval=2, tasks="gcd", settings={})

    assert make(0) == make(0)
    assert {row["prompt_id"] for row in make(0)} != {row["prompt_id"] for row in make(1)}


def test_demonstrations_mix_worked_and_direct_answers_and_all_are_right() -> None:
    rows = procedural.generate_demonstrations(
        random.Random(0), num_train=60, num_eval=6, tasks="chain_sum", settings={}, direct_share=0.5
    )
    direct = [row for row in rows if row["completion"].startswith("####")]
    assert 15 <= len(direct) <= 51  # 33 ± 4 standard deviations
    for row in rows:
        answer = json.loads(row["reference"])["entry"]["answer"]
        *steps, last = row["completion"].splitlines()
        assert last == f"#### {answer}"
        assert not steps or steps[-1].endswith(f"= {answer}")


def test_tasks_without_known_steps_are_answered_directly() -> None:
    rows = procedural.generate_demonstrations(
        random.Random(0), num_train=5, num_eval=1, tasks="leg_counting", settings={}, direct_share=0.0
    )
    assert all(re.fullmatch(r"#### \d+", row["completion"]) for row in rows)


def test_settings_reach_the_generator_that_they_name() -> None:
    rows = procedural.generate_prompts(
        random.Random(0),
        num_train=20,
        num_eval=2,
        tasks="chain_sum,gcd",
        settings={"chain_sum.min_terms": 3, "chain_sum.max_terms": 3},
    )
    sums = [
        json.loads(row["reference"])["entry"]["metadata"]["num_terms"] for row in rows if row["task"] == "chain_sum"
    ]
    assert set(sums) == {3}


@pytest.mark.parametrize(
    ("tasks", "settings", "what"),
    [
        ("no_such_task", {}, "'no_such_task'"),
        ("chain_sum", {"chain_sum.no_setting": 1}, "no_setting"),
        ("chain_sum", {"chain_sum.max_terms": 0}, "max_terms"),
        (" , ", {}, "no task is named"),
        ("chain_sum,codeio", {}, "runs programs that a model wrote"),
    ],
)
def test_unknown_tasks_and_settings_are_refused_by_name(tasks: str, settings: dict[str, int], what: str) -> None:
    with pytest.raises(ContractError, match=what):
        procedural.generate_prompts(random.Random(0), num_train=2, num_eval=2, tasks=tasks, settings=settings)


def test_a_generator_with_too_few_problems_is_an_error_and_no_endless_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(procedural, "_MAX_MISSES", 300)
    settings = {f"chain_sum.{name}": 1 for name in ("min_digits", "max_digits")} | {
        f"chain_sum.{name}": 2 for name in ("min_terms", "max_terms")
    }
    with pytest.raises(ContractError, match="too few different problems"):
        procedural.generate_prompts(random.Random(0), num_train=5000, num_eval=5, tasks="chain_sum", settings=settings)


def test_problems_of_which_one_answer_is_right_are_refused() -> None:
    no_island = {"largest_island.min_num_islands": 0, "largest_island.max_num_islands": 0}
    with pytest.raises(ContractError, match="largest_island: one answer, '0', is right for 20 of 20 problems"):
        procedural.generate_prompts(
            random.Random(1), num_train=16, num_eval=4, tasks="largest_island", settings=no_island
        )
    assert (
        len(
            procedural.generate_prompts(random.Random(1), num_train=16, num_eval=4, tasks="largest_island", settings={})
        )
        == 20
    )
