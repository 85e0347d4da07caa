from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from rlcore.data_contracts.adapters import convert
from rlcore.data_contracts.adapters.layouts import LAYOUTS
from rlcore.data_contracts.adapters.table import ADAPTERS, CONTRACTS
from rlcore.data_contracts.adapters.targets import Kind
from rlcore.data_contracts.contracts.contract import violations
from rlcore.data_contracts.errors import ContractError, RowError
from rlcore.data_contracts.gate.reading import Source, read_source, source_of
from rlcore.data_contracts.gate.stream import Batch

ASK = [{"role": "user", "content": "Why?"}]
PAIR = {"pair_id": "1", "messages": ASK, "chosen": "good", "rejected": "bad", "source": "me"}
ALPACA = {"id": "ae-1", "prompt": "Why?", "chosen": "good", "rejected": "bad", "annotator": "judge", "source": "koala"}
GSM8K = {"question": "Clips?", "answer": "She sold 48/2 = <<48/2=24>>24 clips.\nIn all 1,048.\n#### 1,048"}
HH = {
    "chosen": "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: Why?\n\nAssistant: good",
    "rejected": "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: Why?\n\nAssistant: bad",
}
ULTRA = {
    "instruction": "Why?",
    "completions": [
        {"response": "bad", "overall_score": 2.0},
        {"response": "good", "overall_score": 9},
        {"response": "fair", "overall_score": 5.5},
    ],
}
BINARIZED = {
    "prompt": "Why?",
    "chosen": [*ASK, {"role": "assistant", "content": "good"}],
    "rejected": [*ASK, {"role": "assistant", "content": "bad"}],
    "score_chosen": 8.0,
    "score_rejected": 3.0,
}
CODE_TASK = {"style": "stdin", "tests": [{"input": "", "output": "1"}], "solution": "print(1)"}
HUMANEVAL = {
    "task_id": "HumanEval/0",
    "prompt": 'def one():\n    """One."""\n',
    "canonical_solution": "    return 1\n",
    "test": "def check(candidate):\n    assert candidate() == 1\n",
    "entry_point": "one",
}
LIVECODEBENCH = {
    "question_id": "q",
    "question_content": "Why?",
    "starter_code": "",
    "public_test_cases": json.dumps([{"input": "1", "output": "1", "testtype": "stdin"}]),
    "private_test_cases": "[]",
    "metadata": "{}",
}
TESTS = ["assert f(1) == 2", "assert f(2) == 4"]
ROWS: Mapping[str, Mapping[str, Any]] = {
    "prompts": {"prompt_id": "1", "messages": ASK, "reference": "", "task": "why"},
    "code_tasks": {"prompt_id": "1", "messages": ASK, "reference": json.dumps(CODE_TASK), "task": "code"},
    "humaneval": HUMANEVAL,
    "livecodebench": LIVECODEBENCH,
    "apps": {
        "question": "Double it.",
        "input_output": json.dumps({"fn_name": "f", "inputs": [[1], [2]], "outputs": [[2], [4]]}),
    },
    "code_contests": {"description": "Double it.", "public_tests": {"input": ["1", "2"], "output": ["2", "4"]}},
    "mbpp": {"text": "Double it.", "code": "def f(x): return 2 * x", "test_list": TESTS},
    "kodcode": {
        "question": "Double it.",
        "solution": "def f(x):\n    return 2 * x",
        "test": f"from solution import f\ndef test_one():\n    {TESTS[0]}\ndef test_two():\n    {TESTS[1]}\n",
    },
    "demonstrations": {"demonstration_id": "1", "messages": ASK, "completion": "x", "reference": "", "task": "why"},
    "preferences": PAIR,
    "ranked_sets": {"set_id": "1", "messages": ASK, "completions": ["bad", "good"], "ranks": [1, 0]},
    "alpaca_eval": ALPACA,
    "gsm8k": GSM8K,
    "hh": HH,
    "ultrafeedback": ULTRA,
    "ultrafeedback_binarized": BINARIZED,
    "problems": {"problem": "Why?", "answer": r"\frac{1}{2}", "solution": "Because."},
}

MADE = {"prompt_id", "demonstration_id", "pair_id", "set_id"}  # from the content, without the column

SCORES = {"score_chosen", "score_rejected"}  # a boolean is one

SUMS = "rlcore.examples.arithmetic:ADAPTER"


def adapt(adapter: str, kind: Kind, row: Mapping[str, Any]) -> list[dict[str, Any]]:
    return ADAPTERS[adapter].rows[kind](row)


def batch_of(source: Source, kind: Kind, adapter: str) -> Batch:
    """The rows of a small source."""
    (batch,) = convert.stream_of(source, kind, adapter=adapter).batches()
    return batch


def frame_of(batch: Batch, kind: Kind) -> pd.DataFrame:
    """The rows, each with a split."""
    return pd.DataFrame([{"split": "train", **row} for row in batch.rows], columns=list(CONTRACTS[kind].columns))


def test_every_adapter_of_files_has_an_example_here() -> None:
    assert {*ROWS, *LAYOUTS} == {name for name, adapter in ADAPTERS.items() if adapter.rows}


@pytest.mark.parametrize("name", ROWS)
def test_every_adapter_gives_rows_that_fulfil_the_contract(name: str) -> None:
    for kind in ADAPTERS[name].rows:
        found = batch_of(source_of("test", [dict(ROWS[name])]), kind, name)
        assert len(found.rows) == len(found.origins) > 0
        assert not found.rejected
        assert violations(frame_of(found, kind), convert.contract_of(name, kind)) == []


@pytest.mark.parametrize("name", [name for name, adapter in ADAPTERS.items() if adapter.generators])
def test_every_generator_makes_rows_that_fulfil_the_contract(name: str) -> None:
    for kind, generator in ADAPTERS[name].generators.items():
        for options in ({}, {option: value.default for option, value in generator.options.items()}):
            made = convert.generate(kind, name, num_train=20, num_eval=4, seed=3, options=options)
            found = batch_of(made, kind, name)
            assert not found.rejected
            frame = frame_of(found, kind)
            assert frame["split"].value_counts().to_dict() == {"train": 20, "eval": 4}
            assert violations(frame, convert.contract_of(name, kind)) == []


@pytest.mark.parametrize("name", ROWS)
def test_a_row_without_one_of_its_columns_or_with_a_wrong_type_is_quarantined_with_the_column_named(name: str) -> None:
    for kind in ADAPTERS[name].rows:
        for field in ROWS[name].keys() - MADE - SCORES:
            without = {key: value for key, value in ROWS[name].items() if key != field}
            try:
                adapt(name, kind, without)
            except RowError as fault:
                assert fault.field == field
                assert fault.reason.startswith(f"missing column {field!r}")
                with pytest.raises(RowError) as caught:
                    adapt(name, kind, {**ROWS[name], field: True})
                assert caught.value.field == field
            else:  # a column that the adapter does not read
                assert adapt(name, kind, {**ROWS[name], field: True}) == adapt(name, kind, ROWS[name])


def test_alpaca_eval_pairs_keep_their_id_and_name_their_judge() -> None:
    (pair,) = adapt("alpaca_eval", "preferences", ALPACA)
    assert (pair["pair_id"], pair["messages"], pair["source"], pair["weight"]) == ("ae-1", ASK, "judge", 1.0)
    assert (pair["chosen"], pair["rejected"]) == ("good", "bad")


def test_gsm8k_loses_its_calculator_notes_and_the_commas_of_its_answer() -> None:
    (row,) = adapt("gsm8k", "demonstrations", GSM8K)
    assert row["completion"] == "She sold 48/2 = 24 clips.\nIn all 1,048.\n#### 1048"
    assert row["reference"] == "1048"
    assert adapt("gsm8k", "prompts", GSM8K)[0]["reference"] == "1048"


@pytest.mark.parametrize("answer", ["no marker 5", "ends with ####", "#### "])
def test_gsm8k_without_a_final_answer_is_refused(answer: str) -> None:
    with pytest.raises(RowError, match="no final answer"):
        adapt("gsm8k", "prompts", {**GSM8K, "answer": answer})


def test_hh_transcripts_become_a_conversation_and_two_answers() -> None:
    (pair,) = adapt("hh", "preferences", HH)
    assert pair["messages"] == [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Why?"},
    ]
    assert (pair["chosen"], pair["rejected"]) == ("good", "bad")
    assert adapt("hh", "prompts", HH)[0]["messages"] == pair["messages"]


def test_a_humaneval_task_asks_for_the_whole_function_and_is_tested_with_the_helpers_of_its_prompt() -> None:
    (row,) = adapt("humaneval", "prompts", HUMANEVAL)
    assert row["messages"][0]["content"].endswith('```python\ndef one():\n    """One."""\n```')
    task = json.loads(row["reference"])
    assert (task["style"], task["entry_point"], task["prelude"]) == ("assert", "one", HUMANEVAL["prompt"])
    assert task["solution"] == HUMANEVAL["prompt"] + HUMANEVAL["canonical_solution"]
    assert task["tests"] == [HUMANEVAL["test"] + "\ncheck(candidate)\n"]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"rejected": "\n\nHuman: Ho\n\nAssistant: bad"}, "does not share its context"),
        ({"chosen": "Why?"}, "is no transcript"),
        ({"chosen": "Hm\n\nHuman: Why?\n\nAssistant: good"}, "is no transcript"),
        ({"chosen": "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: Why?"}, "does not end with an assistant's answer"),
    ],
)
def test_hh_transcripts_that_do_not_fit_together_are_refused(changed: dict[str, str], reason: str) -> None:
    with pytest.raises(RowError, match=reason):
        adapt("hh", "preferences", {**HH, **changed})


def test_ultrafeedback_scores_become_the_pairs_of_a_ranking() -> None:
    pairs = adapt("ultrafeedback", "preferences", ULTRA)
    assert [(pair["chosen"], pair["rejected"]) for pair in pairs] == [
        ("good", "fair"),
        ("good", "bad"),
        ("fair", "bad"),
    ]
    with pytest.raises(RowError, match="tied"):
        adapt("ultrafeedback", "preferences", {**ULTRA, "completions": [{"response": "a", "overall_score": 1.0}] * 2})
    with pytest.raises(RowError, match="must be finite"):
        bad = [{"response": "a", "overall_score": float("nan")}, {"response": "b", "overall_score": 1.0}]
        adapt("ultrafeedback", "preferences", {**ULTRA, "completions": bad})


def test_binarized_conversations_must_share_all_but_their_end() -> None:
    other = [{"role": "user", "content": "How?"}, {"role": "assistant", "content": "bad"}]
    with pytest.raises(RowError, match="does not share its context"):
        adapt("ultrafeedback_binarized", "preferences", {**BINARIZED, "rejected": other})
    with pytest.raises(RowError, match="does not end with an assistant's answer"):
        adapt("ultrafeedback_binarized", "preferences", {**BINARIZED, "rejected": other[:1] * 2})


def test_a_fault_inside_a_conversation_is_named_by_its_path() -> None:
    bad = [*ASK, {"role": "user", "content": None}]
    with pytest.raises(RowError) as caught:
        adapt("preferences", "preferences", {**PAIR, "messages": bad})
    assert (caught.value.field, caught.value.reason) == ("messages.1.content", "must be a text, not null")


@pytest.mark.parametrize(
    ("change", "field"), [({"margin": True}, "margin"), ({"margin": "1"}, "margin"), ({"split": "test"}, "split")]
)
def test_nothing_is_converted(change: dict[str, Any], field: str) -> None:
    with pytest.raises(RowError) as caught:
        adapt("preferences", "preferences", {**PAIR, **change})
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("adapter", "kind", "field", "meant"),
    [
        ("preferences", "preferences", "probabilty", "probability"),
        ("preferences", "preferences", "weigth", "weight"),
        ("preferences", "preferences", "Margin", "margin"),
        ("preferences", "preferences", "setid", "set_id"),
        ("prompts", "prompts", "splits", "split"),
        ("code_tasks", "prompts", "SPLIT", "split"),
        ("demonstrations", "demonstrations", "spilt", "split"),
        ("ranked_sets", "preferences", "splitt", "split"),
    ],
)
def test_a_misspelt_field_that_may_be_left_out_is_not_lost_in_silence(
    adapter: str, kind: Kind, field: str, meant: str
) -> None:
    with pytest.raises(RowError, match=f"'{meant}' is: rename it") as caught:
        adapt(adapter, kind, {**ROWS[adapter], field: 0.75})
    assert (caught.value.field, caught.value.value) == (field, 0.75)


def test_columns_that_are_nothing_of_ours_and_a_second_spelling_of_a_given_one_are_left_alone() -> None:
    more = {"difficulty": 3, "group_id": "a", "split": "train", "splits": 4}
    assert adapt("preferences", "preferences", {**PAIR, **more})[0]["split"] == "train"


@pytest.mark.parametrize("name", ["prompts", "code_tasks", "demonstrations", "preferences", "ranked_sets"])
def test_a_row_that_names_another_contract_or_version_is_refused(name: str) -> None:
    (kind,) = ADAPTERS[name].rows
    own = {"preferences": "preference_pairs/v2"}.get(name, f"{name}/v1")
    assert adapt(name, kind, {**ROWS[name], "contract": own}) == adapt(name, kind, ROWS[name])
    with pytest.raises(RowError, match=f"these rows are read as {own}") as caught:
        adapt(name, kind, {**ROWS[name], "contract": own.replace("/v", "/v9")})
    assert caught.value.field == "contract"


def test_a_ranking_with_a_blank_or_with_too_many_answers_gives_no_pair() -> None:
    row = ROWS["ranked_sets"]
    with pytest.raises(RowError, match="must not be blank") as caught:
        adapt("ranked_sets", "preferences", {**row, "completions": ["bad", "\u200b"]})
    assert caught.value.field == "completions.1"
    many = {"completions": [str(number) for number in range(64)], "ranks": list(range(64))}
    assert len(adapt("ranked_sets", "preferences", {**row, **many})) == 64 * 63 // 2
    many = {"completions": [str(number) for number in range(65)], "ranks": list(range(65))}
    with pytest.raises(RowError, match="65 completions are more than 64"):
        adapt("ranked_sets", "preferences", {**row, **many})


def test_bad_rows_are_set_aside_and_the_origins_of_the_others_stay_with_them(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    lines = [json.dumps(PAIR), "{", json.dumps({**PAIR, "chosen": 3}), json.dumps({**PAIR, "pair_id": "2"})]
    path.write_text("\n".join(lines))
    found = batch_of(read_source(path), "preferences", "preferences")
    assert [origin.line for origin in found.origins] == [1, 4]
    assert [row["pair_id"] for row in found.rows] == ["1", "2"]
    assert [(one.origin.line, one.field) for one in found.rejected] == [(2, ""), (3, "chosen")]
    assert found.num_lines == 4


def test_generated_rows_follow_the_seed() -> None:
    first, again, other = (
        convert.generate("prompts", SUMS, num_train=5, num_eval=1, seed=seed, options={}).rows for seed in (0, 0, 1)
    )
    assert first == again
    assert first != other


@pytest.mark.parametrize(
    ("kind", "adapter", "options", "what"),
    [
        ("prompts", "arithmetics", {}, "unknown adapter 'arithmetics'"),
        ("prompts", "gsm8k", {}, "'gsm8k' makes no prompts"),
        ("preferences", "reasoning_gym", {}, "'reasoning_gym' makes no preferences"),
        ("prompts", SUMS, {"direct_share": 0.5}, "has no option 'direct_share'"),
        ("demonstrations", SUMS, {"direct_shares": 0.5}, "has no option 'direct_shares'"),
        ("demonstrations", SUMS, {"direct_share": 1.5}, "must be between 0 and 1"),
        ("demonstrations", SUMS, {"direct_share": "half"}, "must be of type float"),
        ("demonstrations", SUMS, {"a.b": 1}, "has no option 'a.b'"),
        ("prompts", ".x:Y", {}, "the adapter '.x:Y' cannot be imported"),
    ],
)
def test_unknown_adapters_and_options_are_refused_by_name(
    kind: Kind, adapter: str, options: dict[str, Any], what: str
) -> None:
    with pytest.raises(ContractError, match=what):
        convert.generate(kind, adapter, num_train=2, num_eval=1, seed=0, options=options)


def test_an_adapter_that_cannot_read_a_kind_names_those_that_can() -> None:
    with pytest.raises(ContractError, match="'gsm8k' reads no preferences") as caught:
        convert.stream_of(source_of("t", []), "preferences", adapter="gsm8k")
    assert "alpaca_eval" in caught.value.fix
    with pytest.raises(ContractError) as caught:
        convert.stream_of(source_of("t", []), "prompts", adapter="gsm8")
    assert caught.value.fix == "did you mean 'gsm8k'?"


def test_null_keys_of_a_turn_say_nothing_and_whole_ranks_may_be_floats() -> None:
    asked = [{**ASK[0], "name": None, "tool_calls": None}]
    assert adapt("preferences", "preferences", {**PAIR, "messages": asked})[0]["messages"] == ASK
    row = {**ROWS["ranked_sets"], "ranks": [2.0, 1.0]}
    assert [pair["chosen"] for pair in adapt("ranked_sets", "preferences", row)] == ["good"]
    with pytest.raises(RowError, match="must be a whole number"):
        adapt("ranked_sets", "preferences", {**row, "ranks": [1.5, 1.0]})


def test_a_text_in_the_column_prompt_is_no_id() -> None:
    with pytest.raises(RowError, match="missing column 'messages'"):
        adapt("prompts", "prompts", {"prompt": "Why?", "reference": "", "task": "why"})
