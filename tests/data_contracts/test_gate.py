from __future__ import annotations

import json
from typing import Any

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_contracts import convert, gate
from data_contracts.adapters import CONTRACTS, Kind
from data_contracts.budget import TokenMeter
from data_contracts.errors import ContractError
from data_contracts.gate import Candidates, GateLimits, GateResult
from data_contracts.reading import source_of
from data_contracts.records import Origin, Quarantined
from data_contracts.report import GateReport

# One token a word; a prompt costs two more for its template.
METER = TokenMeter(
    encode=lambda text: [hash(word) for word in text.split()],
    prompt_length=lambda messages: 2 + sum(len(turn["content"].split()) for turn in messages),
    special_tokens=("<|end|>", "<|pad|>"),
)


def pair(number: int, **changes: Any) -> dict[str, Any]:
    row = {
        "pair_id": f"p{number}",
        "set_id": f"p{number}",
        "messages": [{"role": "user", "content": f"question {number}"}],
        "chosen": f"right {number}",
        "rejected": f"wrong {number}",
        "margin": 0.0,
        "probability": 1.0,
        "weight": 1.0,
        "source": "test",
        "split": "eval" if number % 4 == 0 else "train",
    }
    return {**row, **changes}


def demonstration(number: int, **changes: Any) -> dict[str, Any]:
    row = pair(number)
    return {
        "demonstration_id": row["pair_id"],
        "messages": row["messages"],
        "completion": row["chosen"],
        "reference": "",
        "task": "test",
        "split": row["split"],
        **changes,
    }


def check(rows: list[dict[str, Any]], kind: Kind = "preferences", **limits: Any) -> GateResult:
    candidates = Candidates(
        source="test",
        frame=pd.DataFrame(rows, columns=list(CONTRACTS[kind].columns)),
        origins=[Origin(line=10 + place) for place in range(len(rows))],
        lines_read=len(rows),
    )
    defaults = {"num_train": 100, "num_eval": 100, "max_tokens": 8, "max_quarantined": 0.5}
    return gate.check(candidates, CONTRACTS[kind], GateLimits(**{**defaults, **limits}), meter=METER)


def rule(result: GateResult, name: str) -> tuple[float, bool]:
    (found,) = [one for one in result.report.rules if one.name == name]
    return found.value, found.ok


def test_clean_rows_pass_and_are_counted() -> None:
    result = check([pair(n) for n in range(8)])
    assert result.report.passed
    assert (result.report.accepted, result.report.quarantined, result.report.rows_read) == (8, 0, 8)
    assert (result.report.num_train, result.report.num_eval) == (6, 2)
    assert list(result.kept.columns) == list(CONTRACTS["preferences"].columns)
    assert rule(result, "as_many_rows_as_asked") == (8 / 200, False)


def test_a_bad_row_is_quarantined_with_its_line_field_value_and_all_its_reasons() -> None:
    result = check([pair(0), pair(1), pair(2, margin=-1.0, source=""), pair(3)])
    assert result.report.passed
    (bad,) = result.quarantine
    assert bad.origin.line == 12
    assert {bad.field, bad.excerpt} <= {"margin", "source", "-1.0", ""}
    assert set(bad.reason.split("; ")) == {"must be between 0 and 100", "must not be blank"}
    assert result.kept["pair_id"].tolist() == ["p0", "p1", "p3"]


def test_one_quarantined_row_in_a_hundred_passes_at_one_percent_and_two_do_not() -> None:
    rows = [pair(n) for n in range(100)]
    rows[7]["chosen"] = ""
    assert check(rows, max_quarantined=0.01).report.passed
    rows[8]["chosen"] = ""
    (fault,) = check(rows, max_quarantined=0.01).report.faults
    assert fault.startswith("2 of 100 rows (2.0%) are quarantined, more than 1.0%: line 17, chosen: must not be blank")


def test_a_pair_with_equal_sides_is_quarantined_with_its_row() -> None:
    result = check([pair(0), pair(1, rejected="right 1"), pair(2)])
    (bad,) = result.quarantine
    assert (bad.origin.line, bad.reason) == (11, "chosen and rejected are the same")


def test_a_pair_that_truncation_makes_equal_is_quarantined() -> None:
    # The prompt costs 2 + 2 of 8 tokens, so 4 tokens of each side are left.
    same, different = "a b c d e", "a b c d f"
    result = check([pair(0), pair(1, chosen=same, rejected=different), pair(2, chosen="a b c e", rejected=same)])
    (bad,) = result.quarantine
    assert (bad.origin.line, bad.field) == (11, "rejected")
    assert bad.reason == "chosen and rejected are the same after truncation to 8 tokens"


def test_the_end_of_the_shorter_side_is_a_token_that_tells_them_apart() -> None:
    # 4 tokens are left: "a b c" and its end against "a b c d".
    assert not check([pair(0), pair(1, chosen="a b c", rejected="a b c d")]).quarantine
    # 3 tokens are left: the end is cut off.
    assert len(check([pair(0), pair(1, chosen="a b c", rejected="a b c d")], max_tokens=7).quarantine) == 1


def test_a_prompt_must_leave_room_for_an_answer() -> None:
    long = [{"role": "user", "content": "one two three four five six"}]  # 2 + 6 tokens
    (bad,) = check([pair(0), pair(1), pair(2, messages=long)]).quarantine
    assert (bad.field, bad.excerpt) == ("messages", "8 tokens")
    assert not check([pair(0), pair(1), pair(2, messages=long)], max_tokens=9).quarantine


def test_a_demonstration_must_fit_whole_with_the_end_of_its_turn() -> None:
    # 4 tokens of prompt, then 3 words and the end: 8; with 4 words 9.
    fits, overlong = demonstration(1, completion="a b c"), demonstration(2, completion="a b c d")
    (bad,) = check([demonstration(0), fits, overlong], "demonstrations").quarantine
    assert (bad.origin.line, bad.field, bad.reason) == (12, "completion", "longer than 8 tokens with its prompt")


@pytest.mark.parametrize(
    "changes",
    [
        {"messages": [{"role": "user", "content": "hi <|end|>"}]},
        {"chosen": "x<|pad|>"},
        {"rejected": "<|end|>"},
    ],
)
def test_a_control_token_in_text_refuses_the_dataset_whatever_the_rate(changes: dict[str, Any]) -> None:
    result = check([pair(n) for n in range(50)] + [pair(50, **changes)], max_quarantined=1.0)
    assert not result.report.passed
    assert "line 60" in result.report.faults[0]
    assert "control token <|" in result.report.faults[0]
    (bad,) = result.quarantine
    assert bad.field in {"messages.0.content", *changes}


def test_text_that_holds_a_control_token_is_never_encoded() -> None:
    def encode(text: str) -> list[int]:
        assert "<|" not in text
        return [1]

    candidates = Candidates(source="test", frame=pd.DataFrame([pair(1, chosen="<|end|>")]), origins=[Origin(line=1)])
    limits = GateLimits(num_train=1, num_eval=1, max_tokens=8, max_quarantined=1.0)
    meter = TokenMeter(encode=encode, prompt_length=lambda messages: 1, special_tokens=("<|end|>",))
    assert len(gate.check(candidates, CONTRACTS["preferences"], limits, meter=meter).quarantine) == 1


def test_pairs_that_contradict_each_other_are_both_quarantined() -> None:
    ask = pair(1)["messages"]
    rows = [pair(0), pair(1), pair(9, messages=ask, chosen="wrong 1", rejected="right 1"), pair(2)]
    result = check(rows)
    assert [one.origin.line for one in result.quarantine] == [11, 12]
    assert result.quarantine[0].excerpt == "p1 against p9"
    assert result.kept["pair_id"].tolist() == ["p0", "p2"]


def test_the_same_answers_to_another_prompt_are_no_contradiction() -> None:
    assert not check([pair(0), pair(1), pair(9, chosen="wrong 1", rejected="right 1")]).quarantine


def test_a_pair_whose_set_has_another_prompt_or_weight_is_quarantined() -> None:
    rows = [pair(1, set_id="s"), pair(2, set_id="s"), pair(3), pair(4)]
    assert [bad.origin.line for bad in check(rows, max_quarantined=0.5).quarantine] == [11]
    question = rows[0]["messages"]
    rows = [pair(1, set_id="s"), pair(2, set_id="s", messages=question, weight=0.5), pair(3), pair(4)]
    (bad,) = check(rows, max_quarantined=0.5).quarantine
    assert (bad.field, bad.reason) == ("set_id", "another pair of this set has another prompt or weight")
    rows = [pair(1, set_id="s"), pair(2, set_id="s", messages=question), pair(3), pair(4)]
    assert not check(rows, max_quarantined=0.5).quarantine


def test_two_rows_with_one_id_refuse_the_dataset() -> None:
    result = check([pair(0), pair(1), pair(2, pair_id="p1")])
    assert result.report.faults == ("unique_ids: 1, the first is 'p1'",)


@pytest.mark.parametrize("num_train", [1, 2, 3, 100])
def test_what_is_wrong_with_a_file_is_wrong_however_many_of_its_rows_are_asked_for(num_train: int) -> None:
    repeated = [pair(0), pair(1), pair(2), pair(3, pair_id="p1"), pair(5)]
    assert check(repeated, num_train=num_train).report.faults == ("unique_ids: 1, the first is 'p1'",)
    leak = pair(0)["messages"]
    leaking = [pair(0), pair(1), pair(2), pair(3, messages=leak), pair(5)]
    (fault,) = check(leaking, num_train=num_train).report.faults
    assert fault == "train_and_eval_share_no_prompt: 1, the first is 'question 0'"


def prompt(number: int, **changes: Any) -> dict[str, Any]:
    row = pair(number)
    return {
        "prompt_id": row["pair_id"],
        "messages": row["messages"],
        "reference": str(number),
        "task": "test",
        "split": row["split"],
        **changes,
    }


@pytest.mark.parametrize("num_train", [1, 100])
def test_rows_that_give_one_prompt_two_references_are_all_quarantined(num_train: int) -> None:
    again = [{"role": "user", "content": " Question  1"}]
    rows = [prompt(0), prompt(1), prompt(2), prompt(3, messages=again), prompt(5, messages=again, reference="1")]
    result = check(rows, "prompts", num_train=num_train, max_quarantined=0.6)
    assert [one.origin.line for one in result.quarantine] == [11, 13, 14]
    assert result.quarantine[0].excerpt == "p1: '1', p3: '3'"
    assert result.quarantine[1].excerpt == "p3: '3', p1: '1'"
    assert {one.reason for one in result.quarantine} == {"another row has the same prompt and another reference"}
    assert result.kept["prompt_id"].tolist() == ["p0", "p2"]


def test_one_prompt_with_one_reference_twice_is_no_contradiction() -> None:
    ask = prompt(1)["messages"]
    assert not check([prompt(0), prompt(1), prompt(2, messages=ask, reference="1")], "prompts").quarantine


def test_the_account_says_what_is_used_what_is_over_and_that_there_is_less_than_asked() -> None:
    report = check([prompt(n) for n in range(8)], "prompts", num_train=4, num_eval=2).report
    assert report.sentence == "4 for training, 2 held out, 2 over, 0 quarantined"
    assert not report.warnings
    short = check([prompt(n) for n in range(8)], "prompts", num_train=4, num_eval=3).report
    # 4 + 2 of 4 + 3
    assert short.warnings == ("there are fewer rows than were asked for (0.857): 4 of 4 for training, 2 of 3 held out",)


def test_a_prompt_on_both_sides_refuses_the_dataset_also_in_another_spelling() -> None:
    leak = [{"role": "user", "content": " QUESTION  0"}]
    result = check([pair(0), pair(1), pair(2, messages=leak)])
    assert rule(result, "train_and_eval_share_no_prompt") == (1.0, False)
    assert not result.report.passed


def test_a_prompt_that_another_dataset_evaluates_on_may_be_held_out_and_not_trained_on() -> None:
    from data_contracts.text import prompt_hash

    def forbid(number: int) -> frozenset[str]:
        return frozenset({prompt_hash(pair(number)["messages"])})

    rows = [pair(n) for n in range(4)]
    assert check(rows, forbidden_prompts=forbid(0)).report.passed
    refused = check(rows, forbidden_prompts=forbid(1))
    assert rule(refused, "train_holds_no_foreign_eval_prompt") == (1.0, False)
    assert not refused.report.passed


def test_a_shared_run_of_thirteen_words_is_reported_and_not_refused() -> None:
    words = " ".join(map(str, range(13)))
    train, held_out = ([{"role": "user", "content": f"{side} {words} {side}"}] for side in ("x", "y"))
    result = check([pair(1, messages=train), pair(4, messages=held_out), pair(8)], max_tokens=64)
    assert rule(result, "eval_shares_no_13_words") == (0.5, False)
    assert result.report.passed


@pytest.mark.parametrize("number", [0, 1])
def test_a_side_without_rows_refuses_the_dataset(number: int) -> None:
    result = check([pair(number)])
    missing = "eval" if number else "train"
    assert result.report.faults == (f"both_splits_have_rows: 1, no rows for {missing}",)


def test_no_rows_refuse_the_dataset() -> None:
    assert check([]).report.faults == ("it has no rows",)


def test_no_rows_after_the_gate_refuse_the_dataset_even_if_all_may_be_quarantined() -> None:
    (fault,) = check([pair(n, chosen="") for n in range(5)], max_quarantined=1.0).report.faults
    assert fault.startswith("none of its 5 rows is left: line 10, chosen: must not be blank")


def test_a_missing_column_is_an_error_of_the_source() -> None:
    candidates = Candidates(
        source="a.parquet", frame=pd.DataFrame([pair(0)]).drop(columns="source"), origins=[Origin(line=1)]
    )
    limits = GateLimits(num_train=1, num_eval=1, max_tokens=8, max_quarantined=0.0)
    with pytest.raises(ContractError, match="source: a column of the contract is missing") as caught:
        gate.check(candidates, CONTRACTS["preferences"], limits, meter=METER)
    assert caught.value.where == "a.parquet"


def test_lines_that_never_became_rows_count_as_quarantined() -> None:
    rejected = [Quarantined(origin=Origin(line=1), field="", excerpt="{", reason="malformed JSON")]
    frame = pd.DataFrame([pair(n) for n in range(8)])
    candidates = Candidates(source="t", frame=frame, origins=[Origin(line=2 + n) for n in range(8)], rejected=rejected)
    limits = GateLimits(num_train=9, num_eval=9, max_tokens=8, max_quarantined=0.2)
    report = gate.check(candidates, CONTRACTS["preferences"], limits, meter=METER).report
    assert (report.rows_read, report.accepted, report.quarantined) == (9, 8, 1)
    assert report.reasons == {"malformed JSON": 1}


def test_the_digest_follows_the_kept_rows_alone() -> None:
    rows = [pair(n) for n in range(8)]
    first = check(rows).report.digest
    assert first == check([*rows, pair(9, chosen="")]).report.digest
    assert first != check([*rows[:-1], {**rows[-1], "margin": 0.5}]).report.digest
    # sha256 of the one line {"a":"ä","b":[1.5]} and a line end
    one = gate.digest_rows(pd.DataFrame({"b": [[1.5]], "a": ["ä"]}))
    assert one == "65731aae383e7ba3838a00ca44ac0ebfe653355658cba84960365a0c98a07db0"


def test_a_report_is_json_and_refuses_wrong_sums() -> None:
    report = check([pair(n) for n in range(8)]).report
    document = json.loads(json.dumps(report.to_json()))
    assert document["passed"] is True
    assert document["sketches"]["source"]["counts"] == {"test": 8}
    assert sum(document["sketches"]["prompt_tokens"]["counts"]) == 8
    with pytest.raises(AssertionError, match=r"7 accepted \+ 0 quarantined != 8 read"):
        GateReport(**{**report.__dict__, "accepted": 7})


def test_a_refused_report_names_three_faults_and_how_many_more() -> None:
    report = GateReport(**{**check([pair(n) for n in range(8)]).report.__dict__, "faults": ("a", "b", "c", "d", "e")})
    with pytest.raises(ContractError, match=r"breaks preference_pairs/v2: a; b; c \(and 2 more\)"):
        report.require_passed(where="x", fix="y")


CHANGES = st.sampled_from(
    [{}, {"margin": -1.0}, {"chosen": ""}, {"rejected": "<|end|>"}, {"messages": []}, {"split": "x"}]
)


@settings(deadline=None, max_examples=30)
@given(st.lists(CHANGES, max_size=12), st.floats(0.0, 1.0))
def test_every_row_is_accepted_or_quarantined_and_none_twice(changes: list[dict[str, Any]], rate: float) -> None:
    rows = [pair(n, **change) for n, change in enumerate(changes)]
    result = check(rows, max_quarantined=rate)
    assert result.report.accepted + result.report.quarantined == len(rows)
    assert result.report.quarantined == sum(bool(change) for change in changes)
    assert len({one.origin.line for one in result.quarantine}) == len(result.quarantine)
    assert set(result.kept["pair_id"]) == {f"p{n}" for n, change in enumerate(changes) if not change}


def test_rankings_in_which_all_are_tied_leave_nothing_and_the_refusal_says_so() -> None:
    tied = {
        "set_id": "s",
        "messages": [{"role": "user", "content": "why"}],
        "completions": ["a", "b", "c"],
        "ranks": [0, 0, 0],
    }
    source = source_of("ties.jsonl", [{**tied, "set_id": str(number)} for number in range(3)])
    limits = GateLimits(num_train=2, num_eval=1, max_tokens=50, max_quarantined=1.0)
    found = convert.candidates(source, "preferences", limits, adapter="ranked_sets")
    result = gate.check(found, CONTRACTS["preferences"], limits, meter=METER)
    with pytest.raises(ContractError, match=r"none of its 3 rows is left: .*all completions are tied"):
        result.report.require_passed(where="ties.jsonl", fix="rank them")
