from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.data_contracts.adapters.table import ADAPTERS, CONTRACTS, own_ranked_sets
from rlcore.data_contracts.errors import ContractError
from rlcore.data_contracts.gate.eval_leakage import SharedWords
from rlcore.data_contracts.gate.reading import read_source, source_of
from rlcore.data_contracts.gate.report import GateReport
from tests.data_contracts.gate.gating import METER, Gated, gate_rows, gate_source


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


def rule(result: Gated, name: str) -> tuple[float, bool]:
    (found,) = [one for one in result.report.rules if one.name == name]
    return found.value, found.ok


def test_clean_rows_pass_and_are_counted() -> None:
    result = gate_rows([pair(n) for n in range(8)])
    assert result.report.passed
    assert (result.report.accepted, result.report.quarantined, result.report.rows_read) == (8, 0, 8)
    assert (result.report.num_train, result.report.num_eval) == (6, 2)
    assert list(result.kept.columns) == list(CONTRACTS["preferences"].columns)
    assert rule(result, "as_many_rows_as_asked") == (8 / 200, False)


def test_a_bad_row_is_quarantined_with_its_line_field_value_and_all_its_reasons() -> None:
    result = gate_rows([pair(0), pair(1), pair(2, margin=-1.0, source=""), pair(3)])
    assert result.report.passed
    (bad,) = result.quarantine
    assert bad.origin.line == 3
    assert {bad.field, bad.excerpt} <= {"margin", "source", "-1.0", ""}
    assert set(bad.reason.split("; ")) == {"must be between 0 and 100", "must not be blank"}
    assert result.kept["pair_id"].tolist() == ["p0", "p1", "p3"]


def test_one_quarantined_row_in_a_hundred_passes_at_one_percent_and_two_do_not() -> None:
    rows = [pair(n) for n in range(100)]
    rows[7]["chosen"] = ""
    assert gate_rows(rows, max_quarantined=0.01).report.passed
    rows[8]["chosen"] = ""
    (error,) = gate_rows(rows, max_quarantined=0.01).report.errors
    assert error.startswith(
        "2 of 100 rows (2.0%) are quarantined, more than max_quarantined = 0.01 allows: line 8, chosen: must not be"
    )


def test_pairs_that_are_equal_or_become_so_by_truncation_are_quarantined() -> None:
    # The prompt costs 2 + 2 of 8 tokens, so 4 tokens of each side are left.
    same, different = "a b c d e", "a b c d f"
    rows = [pair(0), pair(1, chosen=same, rejected=different), pair(2, chosen="a b c e", rejected=same), pair(3)]
    equal, cut = gate_rows([*rows, pair(5, rejected="right 5")]).quarantine[::-1]
    assert (equal.origin.line, equal.reason) == (5, "chosen and rejected are the same")
    assert (cut.origin.line, cut.field) == (2, "rejected")
    assert cut.reason == "chosen and rejected are the same after truncation to 8 tokens"


def test_the_end_of_the_shorter_side_is_a_token_that_tells_them_apart() -> None:
    # 4 tokens are left: "a b c" and its end against "a b c d".
    assert not gate_rows([pair(0), pair(1, chosen="a b c", rejected="a b c d")]).quarantine
    # 3 tokens are left: the end is cut off.
    assert len(gate_rows([pair(0), pair(1, chosen="a b c", rejected="a b c d")], max_tokens=7).quarantine) == 1


def test_a_prompt_must_leave_room_for_an_answer() -> None:
    long = [{"role": "user", "content": "one two three four five six"}]  # 2 + 6 tokens
    (bad,) = gate_rows([pair(0), pair(1), pair(2, messages=long)]).quarantine
    assert (bad.field, bad.excerpt) == ("messages", "8 tokens")
    assert not gate_rows([pair(0), pair(1), pair(2, messages=long)], max_tokens=9).quarantine


def test_a_demonstration_must_fit_whole_with_the_end_of_its_turn() -> None:
    # 4 tokens of prompt, then 3 words and the end: 8; with 4 words 9.
    fits, overlong = demonstration(1, completion="a b c"), demonstration(2, completion="a b c d")
    (bad,) = gate_rows([demonstration(0), fits, overlong], "demonstrations").quarantine
    assert (bad.origin.line, bad.field, bad.reason) == (3, "completion", "longer than 8 tokens with its prompt")


def test_text_that_holds_a_control_token_is_never_encoded() -> None:
    def encode(texts: Sequence[str]) -> list[list[int]]:
        assert "<|" not in "".join(texts)
        return [[1] for _ in texts]

    meter = replace(METER, encode=encode)
    rows = [pair(1, chosen="<|end|>"), pair(2), pair(3)]
    (bad,) = gate_source(source_of("test", rows), "preferences", meter=meter, max_tokens=30).quarantine
    assert bad.field == "chosen"


def test_equal_rows_are_one_row_and_rows_that_share_an_id_alone_are_not() -> None:
    rows = [pair(0), pair(1), pair(1), pair(2, chosen=""), pair(2, chosen="")]
    result = gate_rows(rows)
    assert (result.report.lines_read, result.report.merged, result.report.rows_read) == (5, 2, 3)
    assert [one.origin.line for one in result.quarantine] == [4]
    assert not gate_rows([*rows, pair(1, chosen="better")]).report.passed


def test_the_prompts_of_a_file_of_pairs_come_once() -> None:
    rows = [{"prompt": prompt} for prompt in "AABCD"]
    result = gate_source(
        source_of("test", rows), "prompts", make=ADAPTERS["alpaca_eval"].rows["prompts"], num_train=3, num_eval=1
    )
    assert sorted(messages[0]["content"] for messages in result.kept["messages"]) == list("ABCD")
    assert (result.report.lines_read, result.report.merged) == (5, 1)


@pytest.mark.parametrize("num_train", [1, 2, 3, 100])
def test_what_is_wrong_with_a_file_is_wrong_however_many_of_its_rows_are_asked_for(num_train: int) -> None:
    repeated = [pair(0), pair(1), pair(2), pair(3, pair_id="p1"), pair(5)]
    assert gate_rows(repeated, num_train=num_train).report.errors == (
        "rows with the id of an earlier row: 1; the first is 'p1' in line 4",
    )
    leak = pair(0)["messages"]
    leaking = [pair(0), pair(1), pair(2), pair(3, messages=leak), pair(5)]
    (error,) = gate_rows(leaking, num_train=num_train).report.errors
    assert error == (
        "prompts both for training and held out: 1; the first is 'question 0' in line 4, and 'question 0' in line 1 "
        "is held out"
    )


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
    result = gate_rows(rows, "prompts", num_train=num_train, max_quarantined=0.6)
    assert [one.origin.line for one in result.quarantine] == [2, 4, 5]
    assert result.quarantine[0].excerpt == "p1: '1', p3: '3'"
    assert result.quarantine[1].excerpt == "p3: '3', p1: '1'"
    assert {one.reason for one in result.quarantine} == {"another row has the same prompt and another reference"}
    assert result.kept["prompt_id"].tolist() == ["p0", "p2"]


@pytest.mark.parametrize(("chosen", "warns"), [("wrong", False), ("wr", True), ("too wrong", True)])
def test_sides_of_equal_length_are_not_told_apart_by_it(chosen: str, warns: bool) -> None:
    rows = [pair(n, chosen=f"{chosen[::-1]} {n}") for n in range(8)]
    assert any("length alone" in warning for warning in gate_rows(rows).report.warnings) is warns


def test_the_account_says_what_is_used_what_is_over_and_that_there_is_less_than_asked() -> None:
    report = gate_rows([prompt(n) for n in range(8)], "prompts", num_train=4, num_eval=2).report
    assert report.summary == "4 for training, 2 held out, 2 unused, 0 quarantined"
    assert not report.warnings
    short = gate_rows([prompt(n) for n in range(8)], "prompts", num_train=4, num_eval=3).report
    # 4 + 2 of 4 + 3
    assert short.warnings == ("there are fewer rows than requested: 4 of 4 for training, 2 of 3 held out",)


def test_a_question_that_is_typed_in_two_ways_is_on_one_side_where_we_divide() -> None:
    typed = [f"What is {number} {mark}" for number in range(10, 28) for mark in ("?", "\u200b ?")]
    rows = [prompt(n, messages=[{"role": "user", "content": text}], reference="7") for n, text in enumerate(typed)]
    bare = [{key: value for key, value in row.items() if key != "split"} for row in rows]
    kept = gate_rows(bare, "prompts").kept
    sides = kept.groupby(kept["messages"].map(lambda turns: turns[0]["content"][:10]))["split"].agg(set)
    assert kept["split"].value_counts().to_dict() == {"train": 32, "eval": 4}  # of two of the 18 questions
    assert sorted(map(sorted, sides)) == [["eval"]] * 2 + [["train"]] * 16


@pytest.mark.parametrize(("num_train", "num_eval"), [(1000, 1000), (27, 2), (1, 1000), (1000, 1)])
def test_a_tenth_is_held_out_first_and_the_numbers_only_cut_each_side(num_train: int, num_eval: int) -> None:
    bare = [{key: value for key, value in prompt(n).items() if key != "split"} for n in range(60)]
    whole, cut = (
        gate_rows(bare, "prompts", num_train=trained, num_eval=held_out, keeps_apart=False)
        for trained, held_out in ((1000, 1000), (num_train, num_eval))
    )
    sides = {side: {*whole.kept[whole.kept["split"] == side]["prompt_id"]} for side in ("train", "eval")}
    assert {side: len(names) for side, names in sides.items()} == {"train": 54, "eval": 6}
    for side, names in sides.items():
        kept = {*cut.kept[cut.kept["split"] == side]["prompt_id"]}
        assert kept <= names
        assert len(kept) == min(len(names), num_train if side == "train" else num_eval)
    if num_train == 1000:
        assert cut.report.train_digest == whole.report.train_digest


def test_a_prompt_that_another_dataset_evaluates_on_may_be_held_out_and_not_trained_on() -> None:
    rows = [pair(n) for n in range(4)]
    assert gate_rows(rows, evaluated=[pair(0)["messages"]]).report.passed
    refused = gate_rows(rows, evaluated=[pair(1)["messages"]])
    assert rule(refused, "train_holds_no_foreign_eval_prompt") == (1.0, False)
    assert not refused.report.passed


RUN = " ".join(f"w{place}" for place in range(13))


def asks(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_a_shared_run_of_thirteen_words_is_reported_and_not_refused() -> None:
    train, held_out = asks(f"x {RUN} x"), asks(f"y {RUN} y")
    result = gate_rows([pair(1, messages=train), pair(4, messages=held_out), pair(8)], max_tokens=64)
    assert rule(result, "eval_shares_no_13_words") == (0.5, False)
    assert "1 of 2 evaluation prompts share 13 words with training" in result.report.warnings
    assert result.report.passed


def leaky_rows() -> list[dict[str, Any]]:
    """Return ten pairs, two of which share 13 words with a held-out one, in the question and in an answer."""
    rows = [pair(n) for n in range(10)]
    sides = [row["split"] for row in rows]
    first, second = (n for n, side in enumerate(sides) if side == "train" and n < 3)
    rows[sides.index("eval")] = pair(sides.index("eval"), messages=asks(f"Is it {RUN}?"))
    rows[first] = pair(first, messages=asks(f"Tell me: {RUN}"))
    rows[second] = pair(second, chosen=f"So {RUN}.")
    return rows


def test_rows_that_share_words_with_a_held_out_prompt_are_quarantined_with_both_places() -> None:
    rows, limits = leaky_rows(), {"max_tokens": 64}
    action = SharedWords(action="quarantine")
    result = gate_rows(rows, shared_words=action, **limits)
    refused = {one.origin.line - 1 for one in result.quarantine}
    assert refused == {n for n, row in enumerate(rows) if RUN in str(row) and row["split"] == "train"}
    assert {one.reason for one in result.quarantine} == {action.reason}
    assert all(f"line {[row['split'] for row in rows].index('eval') + 1}" in one.excerpt for one in result.quarantine)
    assert result.report.passed
    assert rule(result, "eval_shares_no_13_words") == (0.0, True)
    assert len(result.kept) == len(rows) - 2
    assert rule(gate_rows(rows, **limits), "eval_shares_no_13_words")[1] is False


def test_rows_that_share_words_with_a_prompt_of_another_data_set_refuse_this_one_where_that_is_asked_for() -> None:
    rows = [pair(n) for n in range(9)] + [pair(9, messages=asks(f"Tell me: {RUN}"), split="train")]
    foreign, action = [asks(f"Is it {RUN}?")], SharedWords(action="refuse")
    result = gate_rows(rows, shared_words=action, evaluated=foreign, max_tokens=64)
    assert not result.report.passed
    assert result.report.errors == (f"training rows rejected: 1; each {action.reason}",)
    assert "in another dataset" in result.quarantine[0].excerpt
    assert result.kept.empty
    assert gate_rows(rows[:9], shared_words=action, evaluated=foreign, max_tokens=64).report.passed


def test_other_rows_take_the_place_of_those_that_share_words() -> None:
    rows = leaky_rows()
    limits: dict[str, Any] = {"max_tokens": 64, "num_train": 3, "shared_words": SharedWords(action="quarantine")}
    kept = gate_rows(rows, **limits).kept
    assert (kept["split"] == "train").sum() == 3
    assert not kept[kept["split"] == "train"].astype(str).apply(lambda row: RUN in " ".join(row), axis=1).any()


@pytest.mark.parametrize("number", [0, 1])
def test_a_side_without_rows_refuses_the_dataset(number: int) -> None:
    result = gate_rows([pair(number)])
    missing = "eval" if number else "train"
    assert result.report.errors == (f"no rows for {missing}; distinct rows that are left: 1",)


def test_no_rows_before_or_after_the_gate_refuse_the_dataset_even_if_all_may_be_quarantined() -> None:
    assert gate_rows([]).report.errors == ("it has no rows",)
    (error,) = gate_rows([pair(n, chosen="") for n in range(5)], max_quarantined=1.0).report.errors
    assert error.startswith("none of its 5 rows is left: line 1, chosen: must not be blank")


def test_lines_that_never_became_rows_count_as_quarantined(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(["{", *(json.dumps(pair(n)) for n in range(8))]))
    result = gate_source(read_source(path), "preferences")
    assert (result.report.rows_read, result.report.accepted, result.report.quarantined) == (9, 8, 1)
    assert [one.origin.line for one in result.quarantine] == [1]


def test_the_digest_follows_the_kept_rows_alone() -> None:
    rows = [pair(n) for n in range(8)]
    first = gate_rows(rows).report.digest
    assert first == gate_rows([*rows, pair(9, chosen="")]).report.digest
    assert first != gate_rows([*rows[:-1], {**rows[-1], "margin": 0.5}]).report.digest
    lines = [json.dumps(row, sort_keys=True, separators=(",", ":"), ensure_ascii=False) + "\n" for row in rows]
    assert first == hashlib.sha256("".join(lines).encode()).hexdigest()


def test_a_column_names_the_documents_that_drift_counts_and_every_row_has_it() -> None:
    rows = [pair(n, source=f"page {n % 2}") for n in range(8)]
    named, unnamed = gate_rows(rows, group_column="source").report, gate_rows(rows).report
    assert named.digest == unnamed.digest
    effects = [each.sketches["source"]["design_effect"] for each in (named, unnamed)]
    assert effects == [8.0, 1.0]  # two documents, each with a name of its own
    with pytest.raises(ContractError, match="group_column = 'page': a row has no such value"):
        gate_rows(rows, group_column="page")


def test_a_report_is_json_and_refuses_wrong_sums() -> None:
    report = gate_rows([pair(n) for n in range(8)]).report
    document = json.loads(json.dumps(report.to_json()))
    assert document["passed"] is True
    assert document["sketches"]["source"]["counts"] == {"test": 8}
    assert sum(document["sketches"]["prompt_tokens"]["counts"]) == 8
    with pytest.raises(AssertionError, match=r"7 accepted \+ 0 quarantined != 8 read"):
        GateReport(**{**report.__dict__, "accepted": 7})


def test_a_refused_report_names_three_faults_and_how_many_more() -> None:
    report = GateReport(
        **{**gate_rows([pair(n) for n in range(8)]).report.__dict__, "errors": ("a", "b", "c", "d", "e")}
    )
    with pytest.raises(ContractError, match=r"breaks preference_pairs/v2: a; b; c \(and 2 more\)"):
        report.require_passed(where="x", fix="y")


CHANGES = st.sampled_from(
    [{}, {"margin": -1.0}, {"chosen": ""}, {"rejected": "<|end|>"}, {"messages": []}, {"split": "x"}]
)


@settings(deadline=None, max_examples=30)
@given(st.lists(CHANGES, max_size=12), st.floats(0.0, 1.0))
def test_every_row_is_accepted_or_quarantined_and_none_twice(changes: list[dict[str, Any]], rate: float) -> None:
    rows = [pair(n, **change) for n, change in enumerate(changes)]
    result = gate_rows(rows, max_quarantined=rate)
    assert result.report.accepted + result.report.quarantined == len(rows)
    assert result.report.quarantined == sum(bool(change) for change in changes)
    assert len({one.origin.line for one in result.quarantine}) == len(result.quarantine)
    valid = {f"p{n}" for n, change in enumerate(changes) if not change}
    assert set(result.kept["pair_id"]) == (valid if result.report.passed else set())


def test_rankings_in_which_all_are_tied_leave_nothing_and_the_refusal_says_so() -> None:
    tied = {"messages": asks("why"), "completions": ["a", "b", "c"], "ranks": [0, 0, 0]}
    source = source_of("ties.jsonl", [{**tied, "set_id": str(number)} for number in range(3)])
    result = gate_source(source, "preferences", make=own_ranked_sets, num_train=2, num_eval=1, max_quarantined=1.0)
    with pytest.raises(ContractError, match=r"none of its 3 rows is left: .*all completions are tied"):
        result.report.require_passed(where="ties.jsonl", fix="rank them")
