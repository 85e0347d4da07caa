"""Contracts: what a row may hold, and the fast check against pandera's."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pandas as pd
import pandera.pandas as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.data_contracts.contracts import code_tasks, column_checks, rollouts, search_corpus
from rlcore.data_contracts.contracts.contract import (
    WHOLE_FRAME,
    Contract,
    passes_fast_path,
    require,
    row_violations,
    violations,
)
from rlcore.data_contracts.contracts.datasets import DEMONSTRATIONS, PREFERENCE_PAIRS, PROMPTS, expand
from rlcore.data_contracts.contracts.results import BENCHMARK_RECORDS, DIFFICULTIES, EVALUATIONS
from rlcore.data_contracts.contracts.search_corpus import read_corpus
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
    (PROMPTS, PROMPT),
    (DEMONSTRATIONS, DEMONSTRATION),
    (PREFERENCE_PAIRS, PAIR),
    (EVALUATIONS, EVALUATION),
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
        (PROMPTS, PROMPT, {"prompt_id": " "}, "prompt_id", "must not be blank"),
        (PROMPTS, PROMPT, {"split": "test"}, "split", "must be 'train' or 'eval'"),
        (PROMPTS, PROMPT, {"reference": "\u200b"}, "reference", UNSEEN),
        (PROMPTS, PROMPT, {"reference": 5}, "reference", "is not of the column's type"),
        (DEMONSTRATIONS, DEMONSTRATION, {"completion": "\n"}, "completion", "must not be blank"),
        (DEMONSTRATIONS, DEMONSTRATION, {"completion": None}, "completion", "must not be null"),
        (PREFERENCE_PAIRS, PAIR, {"margin": -0.5}, "margin", "must be between 0 and 100"),
        (PREFERENCE_PAIRS, PAIR, {"margin": 1e300}, "margin", "must be between 0 and 100"),
        (PREFERENCE_PAIRS, PAIR, {"margin": math.inf}, "margin", "must be between 0 and 100"),
        (PREFERENCE_PAIRS, PAIR, {"set_id": " "}, "set_id", "must not be blank"),
        (PREFERENCE_PAIRS, PAIR, {"probability": 0.5}, "probability", NO_PREFERENCE),
        (PREFERENCE_PAIRS, PAIR, {"probability": 1.01}, "probability", NO_PREFERENCE),
        (PREFERENCE_PAIRS, PAIR, {"weight": 0.0}, "weight", "must be above 0 and at most 1"),
        (PREFERENCE_PAIRS, PAIR, {"weight": 1.5}, "weight", "must be above 0 and at most 1"),
        (PREFERENCE_PAIRS, PAIR, {"rejected": "5"}, "row", "chosen and rejected are the same"),
        (EVALUATIONS, EVALUATION, {"mode": "beam"}, "mode", "must be 'greedy' or 'sampled'"),
        (EVALUATIONS, EVALUATION, {"num_tokens": -1}, "num_tokens", "must be at least 0"),
        (EVALUATIONS, EVALUATION, {"finish_reason": "eos"}, "finish_reason", "must be 'stop' or 'length'"),
        (EVALUATIONS, EVALUATION, {"value": math.nan}, "row", "is called correct without a value"),
        (EVALUATIONS, EVALUATION, {"value": -math.inf}, "value", "must be finite"),
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
    (found,) = violations(pd.DataFrame([{**PAIR, "margin": 1}]), PREFERENCE_PAIRS)
    assert (found.row, found.field, found.reason) == (WHOLE_FRAME, "margin", "is not of the column's type")


def test_frames_of_our_own_must_be_right_and_have_rows() -> None:
    require(pd.DataFrame([PROMPT]), PROMPTS)
    with pytest.raises(ContractError, match="there are no rows"):  # pandera lets an empty frame pass
        require(pd.DataFrame([PROMPT]).iloc[:0], PROMPTS)
    with pytest.raises(ContractError, match="row 1, split: must be 'train' or 'eval'"):
        require(pd.DataFrame([PROMPT, {**PROMPT, "split": ""}], index=[7, 7]), PROMPTS)


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


def test_an_answer_that_is_judged_twice_is_refused() -> None:
    table = pd.DataFrame([EVALUATION, {**EVALUATION, "mode": "sampled"}])
    require(table, EVALUATIONS)
    with pytest.raises(ContractError, match=r"1 rows are there twice, first \('a', 'greedy', 0\)"):
        require(pd.concat([table, table.iloc[:1]], ignore_index=True), EVALUATIONS)


def test_a_ranking_of_three_becomes_three_pairs_of_one_set() -> None:
    pairs = expand("s", ASK, ["worst", "best", "middle"], [2, 0, 1], source="me")
    # best > middle, best > worst, middle > worst
    assert [(pair["chosen"], pair["rejected"]) for pair in pairs] == [
        ("best", "middle"),
        ("best", "worst"),
        ("middle", "worst"),
    ]
    assert {(pair["set_id"], pair["weight"]) for pair in pairs} == {("s", 1.0)}
    assert len({pair["pair_id"] for pair in pairs}) == 3
    assert violations(pd.DataFrame([{**pair, "split": "train"} for pair in pairs]), PREFERENCE_PAIRS) == []


def test_a_tie_gives_no_pair() -> None:
    pairs = expand("s", ASK, ["a", "b", "c"], [0, 0, 1], source="me")
    assert [(pair["chosen"], pair["rejected"]) for pair in pairs] == [("a", "c"), ("b", "c")]


def test_a_ranking_needs_a_rank_for_each_completion() -> None:
    with pytest.raises(RowError, match="1 ranks for 2 completions"):
        expand("s", ASK, ["a", "b"], [0], source="me")


def turn(role: str, content: object = "text") -> dict[str, object]:
    return {"role": role, "content": content}


@pytest.mark.parametrize(
    ("roles", "is_plain", "is_with_calls"),
    [
        (["user"], True, True),
        (["system", "user"], True, True),
        (["user", "assistant", "user"], True, True),
        (["user", "assistant"], False, False),  # answered already
        (["user", "system", "user"], False, False),  # a system message comes first
        (["system"], False, False),
        (["user", "tool"], False, False),
        ([], False, False),
        (["user", "assistant", "tool"], False, True),
        (["user", "assistant", "tool", "assistant", "tool"], False, True),
        (["assistant", "tool"], False, False),
        (["user", "tool", "assistant"], False, False),
        (["user", "assistant", "tool", "tool"], False, False),
    ],
)
def test_a_question_waits_for_an_answer_and_calls_of_tools_may_follow_it_in_pairs(
    roles: list[str], is_plain: bool, is_with_calls: bool
) -> None:
    conversation = [turn(role) for role in roles]
    assert column_checks.is_question(conversation) is is_plain
    assert column_checks.is_question_with_calls(conversation) is is_with_calls


@pytest.mark.parametrize(
    "value",
    [
        *([turn("system"), turn("user", content)] for content in ("", "  ", "a\0b", None, 7)),
        *(None, "user", {"role": "user"}, [{"role": "user"}], [turn("user") | {"name": "x"}], [None]),
    ],
    ids=ascii,
)
def test_a_turn_that_is_blank_or_no_text_or_no_turn_makes_no_question(value: object) -> None:
    assert not column_checks.is_question(value)


CONTRACTS = [
    *(code_tasks.CONTRACT, DEMONSTRATIONS, PREFERENCE_PAIRS, PROMPTS, search_corpus.CONTRACT),
    *(EVALUATIONS, DIFFICULTIES, BENCHMARK_RECORDS, rollouts.ROLLOUTS, rollouts.SCORES),
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


OF_FRAME = ("dtype", "index", "coerce", "ordered", "unique", "parsers", "add_missing_columns", "drop_invalid_rows")
OF_COLUMN = ("regex", "coerce", "unique", "parsers", "default", "drop_invalid_rows")


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda contract: contract.name)
def test_the_fast_path_knows_all_that_a_contract_has(contract: Contract) -> None:
    schema = contract.model.to_schema()
    assert schema.strict is True
    assert not any(getattr(schema, name) for name in OF_FRAME)
    for column in schema.columns.values():
        assert column.required and not any(getattr(column, name) for name in OF_COLUMN)


@pytest.mark.parametrize(("contract", "row"), ROWS, ids=lambda value: getattr(value, "name", ""))
def test_good_rows_need_no_second_look(contract: Contract, row: dict[str, Any]) -> None:
    assert passes_fast_path(pd.DataFrame([row, row]), contract.model)


@settings(max_examples=60, deadline=None)
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


RECORD = {"task": "sums", "doc_id": 0, "doc_sha256": "a" * 64, "metric": "acc,none", "value": 1.0}


def test_sound_records_pass() -> None:
    require(pd.DataFrame([RECORD, {**RECORD, "doc_id": 1, "value": 0.25}]), BENCHMARK_RECORDS)


@pytest.mark.parametrize(
    "change",
    [{"task": " "}, {"doc_id": -1}, {"doc_sha256": "a" * 63}, {"metric": ""}, {"value": float("nan")}, {"more": 1}],
)
def test_a_row_that_breaks_the_contract_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ContractError):
        require(pd.DataFrame([{**RECORD, **change}]), BENCHMARK_RECORDS)


def test_a_document_stands_once() -> None:
    with pytest.raises(ContractError, match=r"1 rows are there twice, first .*acc,none"):
        require(pd.DataFrame([RECORD, RECORD]), BENCHMARK_RECORDS)


SOUND = '{"passage_id": "a", "text": "one"}\n{"passage_id": "b", "text": "two"}\n'


def write(folder: Path, text: str) -> Path:
    path = folder / "corpus.jsonl"
    path.write_text(text, encoding="utf-8")
    return path


def test_passages_come_in_the_order_of_the_file(tmp_path: Path) -> None:
    assert read_corpus(write(tmp_path, SOUND)) == [("a", "one"), ("b", "two")]
    path = tmp_path / "corpus.parquet"
    pd.DataFrame([{"passage_id": "x", "text": "y"}]).to_parquet(path)
    assert read_corpus(path) == [("x", "y")]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("{broken\n", "unreadable lines: line 3"),
        ('{"passage_id": "a", "text": "again"}\n', "1 ids occur twice, the first is 'a'"),
        ('{"passage_id": "c", "text": " "}\n', "row 2, text: must not be blank"),
        ('{"passage_id": "c"}\n', "row 2, text"),
        ('{"passage_id": "c", "text": "t", "page": 1}\n', "page"),
    ],
)
def test_a_fault_refuses_the_corpus_and_names_its_place(tmp_path: Path, more: str, message: str) -> None:
    with pytest.raises(ContractError, match=message):
        read_corpus(write(tmp_path, SOUND + more))


def test_an_empty_corpus_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ContractError):
        read_corpus(write(tmp_path, ""))
