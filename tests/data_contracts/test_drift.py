from __future__ import annotations

import math

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_contracts.drift import compare, sketch

LENGTHS = st.lists(st.integers(0, 20_000), min_size=1, max_size=50)


def test_token_counts_fall_into_bins_of_powers_of_two() -> None:
    made = sketch(pd.DataFrame({"prompt_tokens": [0, 1, 2, 3, 4, 5, 9000]}))["prompt_tokens"]
    # Upper edges 1, 2, 4, 8, …: {0, 1}, {2}, {3, 4}, {5}, …, and one beyond 8192.
    assert made["counts"] == [2, 1, 2, 1, *[0] * 10, 1]
    assert made["max"] == 9000


@given(LENGTHS, LENGTHS)
def test_distance_is_zero_from_itself_and_never_negative(first: list[int], second: list[int]) -> None:
    one, two = (sketch(pd.DataFrame({"prompt_tokens": values})) for values in (first, second))
    assert compare(one, one)["prompt_tokens"] == {"psi": 0.0, "ks": 0.0}
    distance = compare(one, two)["prompt_tokens"]
    assert distance["psi"] >= 0.0
    assert 0.0 <= distance["ks"] <= 1.0 + 1e-12


def test_distances_are_those_of_the_formula() -> None:
    before = sketch(pd.DataFrame({"source": ["a", "a", "a", "b"], "prompt_tokens": [1, 1, 1, 2]}))
    after = sketch(pd.DataFrame({"source": ["a", "b", "b", "b"], "prompt_tokens": [1, 2, 2, 2]}))
    # Shares .75, .25 become .25, .75: PSI = .5 ln 3 + (-.5) ln (1/3) = ln 3; KS = |.75 - .25|.
    found = compare(before, after)
    assert found["source"]["psi"] == pytest.approx(math.log(3))
    assert found["prompt_tokens"] == {"psi": pytest.approx(math.log(3)), "ks": pytest.approx(0.5)}


def test_a_name_that_was_never_seen_before_is_a_large_shift() -> None:
    before, after = (sketch(pd.DataFrame({"task": [name] * 10})) for name in ("sum", "product"))
    assert compare(before, after)["task"]["psi"] > 0.25


def test_columns_that_one_report_lacks_are_left_out() -> None:
    before = sketch(pd.DataFrame({"task": ["a"]}))
    after = sketch(pd.DataFrame({"task": ["a"], "source": ["b"]}))
    assert list(compare(before, after)) == ["task"]
