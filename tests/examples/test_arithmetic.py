from __future__ import annotations

import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.data_contracts.gate.splits import is_held_out
from rlcore.data_contracts.text import prompt_hash
from rlcore.examples import arithmetic

SEEDS = st.integers(0, 2**32)


def final_answer(completion: str) -> int:
    match = re.search(r"^#### (\d+)$", completion, re.MULTILINE)
    assert match, completion
    return int(match.group(1))


def test_a_problem_is_answered_directly_and_in_steps() -> None:
    # 4+3 = 7, 7-6 = 1, 1+7 = 8, 8-2 = 6
    assert arithmetic.answer("4+3-6+7-2") == 6
    assert arithmetic.direct("4+3-6+7-2") == "#### 6"
    assert arithmetic.worked("4+3-6+7-2") == "4+3=7;7-6=1;1+7=8;8-2=6;\n#### 6"


@given(SEEDS)
def test_every_running_total_is_one_digit_and_every_step_is_right(seed: int) -> None:
    problem = arithmetic.make_problem(random.Random(seed))
    assert re.fullmatch(r"[1-9]([+-][1-9]){4}", problem)
    steps = arithmetic.worked(problem).split("\n")[0].rstrip(";").split(";")
    results = [re.fullmatch(r"(\d)([+-]\d)=(\d)", step) for step in steps]
    assert len(results) == 4
    for step in results:
        assert step
        assert int(step[1]) + int(step[2]) == int(step[3])
    assert final_answer(arithmetic.worked(problem)) == arithmetic.answer(problem)


@given(SEEDS)
def test_a_corrupted_solution_is_as_long_as_the_right_one_and_wrong(seed: int) -> None:
    rng = random.Random(seed)
    problem = arithmetic.make_problem(rng)
    wrong = arithmetic.corrupted(problem, rng)
    assert len(wrong) == len(arithmetic.worked(problem))
    assert final_answer(wrong) != arithmetic.answer(problem)
    last_total = wrong.split(";\n")[0][-1]
    assert final_answer(wrong) != int(last_total)


@given(SEEDS)
def test_a_wrong_guess_is_wrong(seed: int) -> None:
    rng = random.Random(seed)
    problem = arithmetic.make_problem(rng)
    assert final_answer(arithmetic.wrong_guess(problem, rng)) != arithmetic.answer(problem)


def test_generated_rows_are_those_of_the_seed_and_all_different() -> None:
    first = arithmetic.generate_prompts(random.Random(7), num_train=300, num_eval=40)
    assert first == arithmetic.generate_prompts(random.Random(7), num_train=300, num_eval=40)
    assert first != arithmetic.generate_prompts(random.Random(8), num_train=300, num_eval=40)
    assert len({row["prompt_id"] for row in first}) == 340
    assert [row["split"] for row in first].count("eval") == 40


def test_held_out_problems_are_the_same_for_every_seed_and_kind() -> None:
    rows = [
        *arithmetic.generate_prompts(random.Random(0), num_train=200, num_eval=50),
        *arithmetic.generate_pairs(random.Random(1), num_train=200, num_eval=50),
        *arithmetic.generate_demonstrations(random.Random(2), num_train=200, num_eval=50, direct_share=0.5),
    ]
    for row in rows:
        assert (row["split"] == "eval") == is_held_out(prompt_hash(row["messages"]))


@pytest.mark.parametrize(("share", "least", "most"), [(0.0, 0, 0), (0.6, 210, 270), (1.0, 400, 400)])
def test_the_share_of_direct_answers_is_as_asked(share: float, least: int, most: int) -> None:
    rows = arithmetic.generate_demonstrations(random.Random(0), num_train=380, num_eval=20, direct_share=share)
    assert least <= sum(row["completion"].startswith("####") for row in rows) <= most  # 240 ± 3 standard deviations


def test_the_chosen_side_is_right_and_the_rejected_side_is_wrong() -> None:
    for row in arithmetic.generate_pairs(random.Random(0), num_train=200, num_eval=20):
        right = arithmetic.answer(row["messages"][0]["content"])
        assert final_answer(row["chosen"]) == right
        assert final_answer(row["rejected"]) != right


def test_more_problems_than_there_are_give_fewer_rows_and_no_endless_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arithmetic, "NUM_TERMS", 1)  # nine problems: 1 … 9
    rows = arithmetic.generate_prompts(random.Random(0), num_train=50, num_eval=50)
    assert len(rows) == 9
