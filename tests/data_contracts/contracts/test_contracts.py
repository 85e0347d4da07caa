from __future__ import annotations

import math
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.data_contracts.contracts import (
    demonstrations,
    evaluations,
    preference_pairs,
    prompts,
    ranked_sets,
    rollouts,
)
from rlcore.data_contracts.contracts.contract import WHOLE_FRAME, Contract, require, violations
from rlcore.data_contracts.errors import ContractError, RowError

ASK = [{"role": "user", "content": "2 + 3 = ?"}]
PROMPT = {"prompt_id": "a", "messages": ASK, "reference": "5", "task": "sum", "split": "train"}
DEMONSTRATION = {
    "demonstration_id": "a",
    "messages": ASK,
    "completion": "5",
    "reference": "5",
    "task": "sum",
    "split": "eval",
}
PAIR = {
    "pair_id": "a",
    "set_id": "a",
    "messages": ASK,
    "chosen": "5",
    "rejected": "6",
    "margin": 0.0,
    "probability": 1.0,
    "weight": 1.0,
    "source": "me",
    "split": "train",
}
RANKED = {"set_id": "a", "messages": ASK, "completions": ["5", "6"], "ranks": [0, 1], "split": "train"}
EVALUATION = {
    "prompt_id": "a",
    "task": "sum",
    "mode": "greedy",
    "sample_index": 0,
    "is_graded": True,
    "correct": True,
    "value": 1.0,
    "completion": "",
    "num_tokens": 0,
    "finish_reason": "stop",
}
ROLLOUT = {
    "iteration": 1,
    "prompt_id": "a",
    "sample_index": 0,
    "prompt": "2 + 3 = ?",
    "reference": "5",
    "text": "5",
    "branch": 0,
    "fork": "",
    "calls": "[]",
    "prompt_ids": [],
    "completion_ids": [9, 2],
    "sampler_logprobs": [-0.5, 0.0],
    "loss_mask": [True, False],
    "policy_version": 0,
    "replica": 0,
    "finish_reason": "stop",
    "replaced": False,
    "value": 1.0,
    "parts": '{"math": 1.0}',
    "error": "",
}
CASES = [
    (prompts.CONTRACT, PROMPT),
    (demonstrations.CONTRACT, DEMONSTRATION),
    (preference_pairs.CONTRACT, PAIR),
    (ranked_sets.CONTRACT, RANKED),
    (evaluations.CONTRACT, EVALUATION),
]


@pytest.mark.parametrize(("contract", "row"), CASES, ids=lambda value: getattr(value, "name", ""))
def test_a_good_row_passes_and_a_missing_or_extra_column_does_not(contract: Contract, row: dict[str, Any]) -> None:
    frame = pd.DataFrame([row])
    assert violations(frame, contract) == []
    for name in row:
        (found,) = [one for one in violations(frame.drop(columns=name), contract) if one.row == WHOLE_FRAME]
        assert (found.value, found.reason) == (name, "a column of the contract is missing")
    found, *_ = violations(pd.DataFrame([{**row, "extra": 1}]), contract)
    assert (found.row, found.value, found.reason) == (WHOLE_FRAME, "extra", "a column that the contract does not know")


UNSEEN = "must be empty or something that a reader sees"
NO_PREFERENCE = "must be above 0.5 and at most 1: at 0.5 it is a tie, below the sides are swapped"


@pytest.mark.parametrize(
    ("contract", "row", "change", "field", "reason"),
    [
        (prompts.CONTRACT, PROMPT, {"prompt_id": " "}, "prompt_id", "must not be blank"),
        (prompts.CONTRACT, PROMPT, {"split": "test"}, "split", "must be 'train' or 'eval'"),
        (prompts.CONTRACT, PROMPT, {"reference": "\u200b"}, "reference", UNSEEN),
        (prompts.CONTRACT, PROMPT, {"reference": 5}, "reference", "is not of the column's type"),
        (demonstrations.CONTRACT, DEMONSTRATION, {"completion": "\n"}, "completion", "must not be blank"),
        (demonstrations.CONTRACT, DEMONSTRATION, {"completion": None}, "completion", "must not be null"),
        (preference_pairs.CONTRACT, PAIR, {"margin": -0.5}, "margin", "must be between 0 and 100"),
        (preference_pairs.CONTRACT, PAIR, {"margin": 1e300}, "margin", "must be between 0 and 100"),
        (preference_pairs.CONTRACT, PAIR, {"margin": math.inf}, "margin", "must be between 0 and 100"),
        (preference_pairs.CONTRACT, PAIR, {"set_id": " "}, "set_id", "must not be blank"),
        (preference_pairs.CONTRACT, PAIR, {"probability": 0.5}, "probability", NO_PREFERENCE),
        (preference_pairs.CONTRACT, PAIR, {"probability": 1.01}, "probability", NO_PREFERENCE),
        (preference_pairs.CONTRACT, PAIR, {"weight": 0.0}, "weight", "must be above 0 and at most 1"),
        (preference_pairs.CONTRACT, PAIR, {"weight": 1.5}, "weight", "must be above 0 and at most 1"),
        (preference_pairs.CONTRACT, PAIR, {"rejected": "5"}, "row", "chosen and rejected are the same"),
        (ranked_sets.CONTRACT, RANKED, {"ranks": [0, 1, 2]}, "row", "needs one rank for each completion"),
        (ranked_sets.CONTRACT, RANKED, {"ranks": [0, -1]}, "ranks", "must be integers from 0"),
        (ranked_sets.CONTRACT, RANKED, {"ranks": [0, True]}, "ranks", "must be integers from 0"),
        (evaluations.CONTRACT, EVALUATION, {"mode": "beam"}, "mode", "must be 'greedy' or 'sampled'"),
        (evaluations.CONTRACT, EVALUATION, {"num_tokens": -1}, "num_tokens", "must be at least 0"),
        (evaluations.CONTRACT, EVALUATION, {"finish_reason": "eos"}, "finish_reason", "must be 'stop' or 'length'"),
        (evaluations.CONTRACT, EVALUATION, {"value": math.nan}, "row", "is called correct without a value"),
        (evaluations.CONTRACT, EVALUATION, {"value": -math.inf}, "value", "must be finite"),
    ],
)
def test_each_rule_names_the_row_the_field_and_the_reason_once(
    contract: Contract, row: dict[str, Any], change: dict[str, Any], field: str, reason: str
) -> None:
    found = violations(pd.DataFrame([row, {**row, **change}, row]), contract)
    assert (1, field, reason) in [(one.row, one.field, one.reason) for one in found]
    assert {one.row for one in found} == {1}
    assert len({(one.field, one.reason) for one in found}) == len(found)


def test_a_value_of_the_wrong_type_is_refused_and_never_converted() -> None:
    (found,) = violations(pd.DataFrame([{**PAIR, "margin": 1}]), preference_pairs.CONTRACT)
    assert (found.row, found.field, found.reason) == (WHOLE_FRAME, "margin", "is not of the column's type")


def test_frames_of_our_own_must_be_right_and_have_rows() -> None:
    require(pd.DataFrame([PROMPT]), prompts.CONTRACT)
    with pytest.raises(ContractError, match="there are no rows"):  # pandera lets an empty frame pass
        require(pd.DataFrame([PROMPT]).iloc[:0], prompts.CONTRACT)
    with pytest.raises(ContractError, match="row 1, split: must be 'train' or 'eval'"):
        require(pd.DataFrame([PROMPT, {**PROMPT, "split": ""}], index=[7, 7]), prompts.CONTRACT)


def rollout_table(*changes: dict[str, Any]) -> pd.DataFrame:
    return pd.DataFrame([{**ROLLOUT, "sample_index": place, **change} for place, change in enumerate(changes)])


def test_scored_rollouts_pass_also_when_the_grader_failed_on_one_or_a_softmax_was_rounded() -> None:
    failed = {"value": math.nan, "error": "timeout"}
    rounded = {"sampler_logprobs": [1e-7, 0.0]}
    rollouts.check_rollouts(rollout_table({}, failed, rounded, {"prompt_id": "b", "sample_index": 0}))
    with pytest.raises(ContractError, match="extra"):
        rollouts.check_rollouts(rollout_table({"extra": 1}))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"sampler_logprobs": [-0.5]}, "completion_ids, sampler_logprobs and loss_mask differ in length"),
        ({"sampler_logprobs": [-0.5, 1e-5]}, "must be finite and at most 0"),
        ({"sampler_logprobs": [-0.5, -math.inf]}, "must be finite and at most 0"),
        ({"sampler_logprobs": [-0.5, math.nan]}, "must be finite and at most 0"),
        ({"loss_mask": [1, 0]}, "must be true or false"),
        ({"completion_ids": [], "sampler_logprobs": [], "loss_mask": []}, "must be token ids, at least one"),
        ({"completion_ids": [9, -1]}, "must be token ids, at least one"),
        ({"finish_reason": "eos"}, "must be 'stop' or 'length'"),
        ({"policy_version": -1}, "must be at least 0"),
        ({"replica": -1}, "must be at least 0"),
        ({"prompt_ids": [3, -1]}, "must be token ids"),
        ({"calls": '[["turn", "", "output"]]'}, "must be a JSON list of [text, tool, output, is_error]"),
        ({"calls": "{}"}, "must be a JSON list of [text, tool, output, is_error]"),
        ({"fork": "another history"}, "fork must be the reason of a branch"),
        ({"sample_index": 0, "branch": 1}, "fork must be the reason of a branch"),
        ({"value": math.nan}, "has neither a value nor an error"),
        ({"value": math.inf}, "must be finite"),
        ({"parts": '{"math": NaN}'}, "must be a JSON object of finite numbers"),
        ({"parts": "[1]"}, "must be a JSON object of finite numbers"),
    ],
)
def test_a_broken_rollout_or_score_is_named(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ContractError, match="row 1, ") as caught:
        rollouts.check_rollouts(rollout_table({}, change))
    assert reason in caught.value.what


@pytest.mark.parametrize(
    ("indices", "is_complete"),
    [([0, 1, 2], True), ([2, 0, 1], True), ([0, 2], False), ([1, 2], False), ([0, 1, 1], False), ([0, 0, 1], True)],
)
def test_groups_are_numbered_without_a_hole(indices: list[int], is_complete: bool) -> None:
    # [0, 0, 1]: the prompt was drawn twice in the iteration, and one completion of the second group failed.
    table = rollout_table(*({"sample_index": index} for index in indices))
    assert (rollouts.incomplete_groups(table) == []) is is_complete
    if not is_complete:
        with pytest.raises(ContractError, match=r"the first is \(1, 'a'\)"):
            rollouts.check_rollouts(table)


@pytest.mark.parametrize(
    ("branches", "is_complete"),
    [([0, 1, 2], True), ([0, 2], False), ([1], False), ([0, 1, 1], False), ([0, 1, 0, 1], True), ([0, 1, 0], True)],
)
def test_the_branches_of_an_episode_are_numbered_without_a_hole(branches: list[int], is_complete: bool) -> None:
    changes = [{"sample_index": 0, "branch": each, "fork": "another history" * (each > 0)} for each in branches]
    calls = {"calls": '[["3+4?", "calculator", "7", false]]', "prompt_ids": [1, 2]}
    table = rollout_table(*changes, {"sample_index": 1, **calls})
    assert (rollouts.incomplete_groups(table) == []) is is_complete
    if is_complete:
        rollouts.check_rollouts(table)


def test_an_answer_that_is_judged_twice_is_refused() -> None:
    table = pd.DataFrame([EVALUATION, {**EVALUATION, "mode": "sampled"}])
    require(table, evaluations.CONTRACT)
    with pytest.raises(ContractError, match=r"1 rows are there twice, first \('a', 'greedy', 0\)"):
        require(pd.concat([table, table.iloc[:1]], ignore_index=True), evaluations.CONTRACT)


def test_a_ranking_of_three_becomes_three_pairs_of_one_set() -> None:
    pairs = ranked_sets.expand("s", ASK, ["worst", "best", "middle"], [2, 0, 1], source="me")
    # best > middle, best > worst, middle > worst
    assert [(pair["chosen"], pair["rejected"]) for pair in pairs] == [
        ("best", "middle"),
        ("best", "worst"),
        ("middle", "worst"),
    ]
    assert {(pair["set_id"], pair["weight"]) for pair in pairs} == {("s", 1.0)}
    assert violations(pd.DataFrame([{**pair, "split": "train"} for pair in pairs]), preference_pairs.CONTRACT) == []


def test_a_tie_gives_no_pair() -> None:
    pairs = ranked_sets.expand("s", ASK, ["a", "b", "c"], [0, 0, 1], source="me")
    assert [(pair["chosen"], pair["rejected"]) for pair in pairs] == [("a", "c"), ("b", "c")]


@given(st.lists(st.integers(0, 5), min_size=2, max_size=7))
def test_the_pairs_of_any_ranking_are_one_set_and_prefer_the_better_rank(ranks: list[int]) -> None:
    names = [str(place) for place in range(len(ranks))]
    if len(set(ranks)) == 1:
        with pytest.raises(RowError, match="tied"):
            ranked_sets.expand("s", ASK, names, ranks, source="me")
        return
    pairs = ranked_sets.expand("s", ASK, names, ranks, source="me")
    assert {pair["set_id"] for pair in pairs} == {"s"}
    assert all(ranks[int(pair["chosen"])] < ranks[int(pair["rejected"])] for pair in pairs)
    assert len({pair["pair_id"] for pair in pairs}) == len(pairs)
    if len(set(ranks)) == len(ranks):
        assert len(pairs) == len(ranks) * (len(ranks) - 1) // 2


def test_a_ranking_needs_a_rank_for_each_completion() -> None:
    with pytest.raises(RowError, match="1 ranks for 2 completions"):
        ranked_sets.expand("s", ASK, ["a", "b"], [0], source="me")
