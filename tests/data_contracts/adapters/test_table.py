"""Adapters of files and generators: rows of their contract, and rows that are refused."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from rlcore.data_contracts.adapters import convert, procedural
from rlcore.data_contracts.adapters.expressions import Kind
from rlcore.data_contracts.adapters.layouts import LAYOUTS
from rlcore.data_contracts.adapters.table import ADAPTERS, CONTRACTS
from rlcore.data_contracts.contracts.contract import violations
from rlcore.data_contracts.errors import ContractError, RowError
from rlcore.data_contracts.gate.reading import Source, read_source, source_of
from rlcore.data_contracts.gate.splits import is_held_out
from rlcore.data_contracts.gate.stream import Batch
from rlcore.data_contracts.text import prompt_hash

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
    (batch,) = convert.stream_of(source, kind, adapter=adapter).batches()
    return batch


def frame_of(batch: Batch, kind: Kind) -> pd.DataFrame:
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
            except RowError as error:
                assert error.field == field
                assert error.reason.startswith(f"missing column {field!r}")
                with pytest.raises(RowError) as caught:
                    adapt(name, kind, {**ROWS[name], field: True})
                assert caught.value.field == field
            else:  # a column that the adapter does not read
                assert adapt(name, kind, {**ROWS[name], field: True}) == adapt(name, kind, ROWS[name])


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


def test_columns_that_are_nothing_of_ours_and_a_second_spelling_of_a_given_one_are_left_alone() -> None:
    more = {"difficulty": 3, "group_id": "a", "split": "train", "splits": 4}
    assert adapt("preferences", "preferences", {**PAIR, **more})[0]["split"] == "train"


def test_bad_rows_are_set_aside_and_the_origins_of_the_others_stay_with_them(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    lines = [json.dumps(PAIR), "{", json.dumps({**PAIR, "chosen": 3}), json.dumps({**PAIR, "pair_id": "2"})]
    path.write_text("\n".join(lines))
    found = batch_of(read_source(path), "preferences", "preferences")
    assert [origin.line for origin in found.origins] == [1, 4]
    assert [row["pair_id"] for row in found.rows] == ["1", "2"]
    assert [(one.origin.line, one.field) for one in found.rejected] == [(2, ""), (3, "chosen")]
    assert found.num_lines == 4


@pytest.mark.parametrize("adapter", [SUMS, "reasoning_gym"])
def test_generated_rows_follow_the_seed(adapter: str) -> None:
    first, again, other = (
        convert.generate("prompts", adapter, num_train=5, num_eval=1, seed=seed, options={}).rows for seed in (0, 0, 1)
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


def test_a_sum_is_worked_with_running_totals() -> None:
    assert procedural.worked_sum("4 - 1 - 7") == "4 - 1 = 3\n3 - 7 = -4"
    assert procedural.worked_sum("5 - -2 + 10") == "5 - -2 = 7\n7 + 10 = 17"


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
