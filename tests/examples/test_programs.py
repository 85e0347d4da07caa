"""The code task for small models: both styles are right, and the hidden tests tell right from wrong."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.examples import programs

PROBLEM = "add 3;from 5;times 2;mod 7"


def test_the_two_styles_of_a_worked_example() -> None:
    assert programs.stepwise(PROBLEM) == "def f(x):\n x+=3\n x=5-x\n x*=2\n x%=7\n return x"
    assert programs.nested(PROBLEM) == "def f(x):\n return ((5-(x+3))*2)%7"
    assert programs.value(PROBLEM, 4) == ((5 - 7) * 2) % 7 == 3


@given(st.integers(0, 10_000), st.integers(-1000, 1000))
def test_both_styles_compute_the_value_of_their_problem(seed: int, x: int) -> None:
    problem = programs.make_problem(random.Random(seed))
    for code in (programs.stepwise(problem), programs.nested(problem)):
        space: dict[str, object] = {}
        exec(code, space)  # code of ours
        assert space["f"](x) == programs.value(problem, x)  # type: ignore[operator]


def test_the_prompt_does_not_hold_the_tests_and_the_tests_are_the_values_of_the_problem() -> None:
    rows = programs.generate_prompts(random.Random(0), num_train=30, num_eval=5)
    for row in rows:
        problem = row["messages"][0]["content"]
        tests = json.loads(row["reference"])["tests"]
        assert len({test["args"][0] for test in tests}) == programs.NUM_TESTS
        assert [test["output"] for test in tests] == [programs.value(problem, *test["args"]) for test in tests]


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_the_share_of_nested_demonstrations_is_as_asked(share: float) -> None:
    rows = programs.generate_demonstrations(random.Random(0), num_train=30, num_eval=3, nested_share=share)
    assert {row["completion"].count("\n") == 1 for row in rows} == {share == 1.0}
