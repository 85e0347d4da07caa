"""The quick look at a frame against pandera's own, over every contract, on good rows and on spoilt ones."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
import pandera.pandas as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.data_contracts.contracts import (
    code_tasks,
    demonstrations,
    evaluations,
    preference_pairs,
    prompts,
    ranked_sets,
    rollouts,
    search_corpus,
)
from rlcore.data_contracts.contracts.contract import Contract, is_plain, passes_fast_path, row_violations, violations
from tests.data_contracts.contracts.test_contracts import CASES, ROLLOUT, rollout_table

CONTRACTS = [
    code_tasks.CONTRACT,
    demonstrations.CONTRACT,
    evaluations.CONTRACT,
    preference_pairs.CONTRACT,
    prompts.CONTRACT,
    ranked_sets.CONTRACT,
    search_corpus.CONTRACT,
    rollouts.ROLLOUTS,
    rollouts.SCORES,
]
ROWS = [
    *CASES,
    *((contract, {name: ROLLOUT[name] for name in contract.columns}) for contract in CONTRACTS[-2:]),
]
# What may stand where it should not: each is right in some column.
VALUES: list[Any] = [
    *(None, math.nan, math.inf, -math.inf, -1, 0, 1, 0.5, -0.5, True, False, "", " ", "a", "a\0b", "stop", "train"),
    *([], [0], [1, 2], [0.0, -1.0], [True, False], ["a", "b"], [None], "{}", '{"math": NaN}', "[1]", {"a": 1}),
]


def pandera_passes(frame: pd.DataFrame, contract: Contract) -> bool:
    try:
        contract.model.validate(frame, lazy=True)
    except pa.errors.SchemaErrors:
        return False
    return True


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda contract: contract.name)
def test_every_contract_is_one_that_can_be_looked_at_quickly(contract: Contract) -> None:
    assert is_plain(contract.model)


@pytest.mark.parametrize(("contract", "row"), ROWS, ids=lambda value: getattr(value, "name", ""))
def test_good_rows_need_no_second_look(contract: Contract, row: dict[str, Any]) -> None:
    assert passes_fast_path(pd.DataFrame([row, row]), contract.model)


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_the_quick_verdict_is_panderas(data: st.DataObject) -> None:
    contract, row = data.draw(st.sampled_from(ROWS))
    spoilt = data.draw(st.dictionaries(st.sampled_from(contract.columns), st.sampled_from(VALUES), max_size=2))
    rows = data.draw(st.permutations([row, row, {**row, **spoilt}]))
    rows = rows[: data.draw(st.integers(1, 3))]
    frame = pd.DataFrame(rows)
    assert passes_fast_path(frame, contract.model) == pandera_passes(frame, contract)
    found = [(one.row, one.field, repr(one.value), one.reason) for one in violations(frame, contract)]
    assert [(one.row, one.field, repr(one.value), one.reason) for one in row_violations(rows, contract)] == found


@pytest.mark.parametrize(
    "options",
    [{"strict": False}, {"strict": "filter"}, {"ordered": True}, {"unique": ["x"]}, {"coerce": True}],
    ids=repr,
)
def test_a_model_with_rules_of_another_kind_is_left_to_pandera(options: dict[str, Any]) -> None:
    class Model(pa.DataFrameModel):
        x: int

        Config = type("Config", (), {"strict": True, **options})

    assert not is_plain(Model)
    assert not passes_fast_path(pd.DataFrame({"x": [1]}), Model)


@pytest.mark.parametrize("options", [{"unique": True}, {"coerce": True}, {"regex": True, "alias": "x"}], ids=repr)
def test_a_column_with_rules_of_another_kind_is_left_to_pandera(options: dict[str, Any]) -> None:
    class Model(pa.DataFrameModel):
        x: int = pa.Field(**options)

        class Config:
            strict = True

    assert not passes_fast_path(pd.DataFrame({"x": [1, 1]}), Model)


def test_a_column_that_is_there_twice_is_refused() -> None:
    table = rollout_table({})
    with pytest.raises(Exception, match="broken rules"):
        rollouts.check_rollouts(pd.concat([table, table["error"]], axis=1))


KEYS = st.tuples(st.integers(1, 2), st.sampled_from("ab"), st.integers(0, 3), st.sampled_from([0, 0, 0, 1, 2]))


@given(st.lists(KEYS, min_size=1, max_size=9))
def test_groups_with_holes_are_those_whose_indices_no_whole_draws_explain(
    keys: list[tuple[int, str, int, int]],
) -> None:
    """Brute force: a group is whole if its indices are runs 0..n put together, and so are each index's branches."""
    table = pd.DataFrame(keys, columns=list(rollouts.KEYS))

    def is_whole(indices: list[int]) -> bool:
        left = sorted(indices)
        while left:
            for place in range(max(left) + 1):
                if place not in left:
                    return False
                left.remove(place)
        return True

    def has_hole(group: tuple[int, str]) -> bool:
        own = [key for key in keys if key[:2] == group]
        branches = [[key[3] for key in own if key[2] == index] for index in {key[2] for key in own}]
        return not is_whole([index for *_, index, branch in own if branch == 0]) or not all(map(is_whole, branches))

    assert rollouts.incomplete_groups(table) == sorted(group for group in {key[:2] for key in keys} if has_hole(group))
