"""Mappings of columns: the language of their expressions, their mistakes, and what they carry to rewards."""

from __future__ import annotations

import json
from datetime import date
from decimal import Decimal
from typing import Any

import pytest

from rlcore.data_contracts.adapters.convert import first_rows, stream_of
from rlcore.data_contracts.adapters.expressions import parse
from rlcore.data_contracts.adapters.other_columns import MAX_BYTES
from rlcore.data_contracts.adapters.targets import Kind, parse_columns
from rlcore.data_contracts.errors import ContractError, RowError
from rlcore.data_contracts.gate.reading import source_of
from rlcore.data_contracts.gate.stream import Batch

ROW = {
    "problem": "Why?",
    "answer": 3,
    "extra_info": {"answer": "x", "list": [{"a": "b"}]},
    "a.b": 1,
    "choices": ["p", "q"],
}


def read(row: dict[str, Any], columns: dict[str, Any], kind: Kind = "prompts", **settings: Any) -> Batch:
    stream = stream_of(source_of("t", [row]), kind, adapter="columns", columns=columns, **settings)
    (batch,) = stream.batches()
    return batch


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("problem", "Why?"),
        ("extra_info.answer", "x"),
        ("extra_info.list.0.a", "b"),
        ("extra_info.list.-1.a", "b"),
        ("extra_info.list.*.a", ["b"]),
        ("a.b", 1),
        ("nothing?", None),
        ("extra_info.nothing?", None),
        ("=math", "math"),
        (0.5, 0.5),
        ("{problem} {{{answer}}}\n{choices}", "Why? {3}\np\nq"),
        ("{problem}\n{choices|letters}", "Why?\nA. p\nB. q"),
        ("{problem}\n\n{nothing?}", "Why?"),
    ],
)
def test_an_expression_reads_a_path_a_template_or_a_constant(expression: Any, value: object) -> None:
    assert parse(expression).read(ROW) == value


@pytest.mark.parametrize(
    ("expression", "field", "reason"),
    [
        ("probelm", "probelm", "did you mean 'problem'?; there are a.b, answer, choices, extra_info, problem"),
        ("extra_info.answr", "extra_info.answr", "did you mean 'answer'?; there are answer, list"),
        ("extra_info.list.3.a", "extra_info.list", "has 1 items, and no item 3"),
        ("problem.__class__", "problem", "must be an object with '__class__', not a text"),
        ("{problem.__class__}", "problem", "must be an object with '__class__', not a text"),
        ("{extra_info}", "extra_info", "must be a text, a number or a list of texts, not an object"),
        ("problem|boxed", "problem", "has no answer in a closed"),
    ],
)
def test_a_mistake_names_the_column_the_nearest_and_all_there_are(expression: str, field: str, reason: str) -> None:
    with pytest.raises(RowError) as caught:
        parse(expression).read(ROW)
    assert caught.value.field == field
    assert reason in caught.value.reason


@pytest.mark.parametrize(
    ("solution", "answer"),
    [(r"so \boxed{1} and \boxed{\frac{1}{2}}.", r"\frac{1}{2}"), (r"\boxed {\{1, 2\}}", r"\{1, 2\}")],
)
def test_the_last_box_is_the_answer(solution: str, answer: str) -> None:
    assert parse("s|boxed").read({"s": solution}) == answer


@pytest.mark.parametrize(
    ("columns", "kind", "errors"),
    [
        ({"refrence": "answer", "prompt": "x|boxd"}, "prompts", ["did you mean 'reference'?", "no filter 'boxd'"]),
        ({"reference": "answer"}, "prompts", ["prompt: is missing"]),
        ({"prompt": "{problem"}, "prompts", ["has a single brace"]),
        ({"prompt": "a..b"}, "prompts", ["names no column"]),
        ({"prompt": "p", "difficulty": "d", "completion": "c"}, "demonstrations", ["difficulty: is no target"]),
        ({"prompt": "p", "chosen": "c"}, "preferences", ["the pair: name chosen, rejected; or "]),
        ({"responses": "r", "scores": "s"}, "preferences", ["prompt: is missing"]),
    ],
)
def test_a_malformed_mapping_names_all_its_errors(columns: dict[str, Any], kind: Kind, errors: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        parse_columns(columns, kind)
    assert len(str(caught.value).splitlines()) == len(errors)
    assert all(error in str(caught.value) for error in errors)
    with pytest.raises(ContractError, match="mapping of columns is malformed"):
        read(ROW, columns, kind)


def test_scores_make_pairs_by_a_gap_and_a_rule_for_ties() -> None:
    columns = {"prompt": "q", "responses": "a.*.t", "scores": "a.*.s", "min_gap": 1, "margin": 0.5}
    row = {"q": "Why?", "a": [{"t": "x", "s": "1.0"}, {"t": "y", "s": 2}, {"t": "z", "s": 3.5}]}
    pairs = read(row, columns, "preferences").rows
    assert [(pair["chosen"], pair["rejected"], pair["margin"]) for pair in pairs] == [("z", "y", 0.5), ("z", "x", 0.5)]
    (lost,) = read(row, {**columns, "min_gap": 5}, "preferences").rejected
    assert lost.reason.startswith("left out: ")
    (lost,) = read(row, {**columns, "min_gap": 5, "ties": "=refuse"}, "preferences").rejected
    assert lost.reason == "all completions are tied, so no pair follows"


def test_the_columns_beside_the_question_travel_and_named_ones_under_their_name() -> None:
    columns = {"prompt": "problem", "reference": "answer", "hint": "extra_info.list.0.a"}
    (made,) = read({**ROW, "day": date(2026, 11, 25), "image": b"\x00"}, columns).rows
    assert made["form"] == "text"
    assert json.loads(made["columns"]) == {
        "answer": 3,
        "extra_info": ROW["extra_info"],
        "a.b": 1,
        "choices": ["p", "q"],
        "day": "2026-11-25",
        "hint": "b",
    }
    (made,) = read(ROW, columns, without=["extra_info", "choices"]).rows
    assert json.loads(made["columns"]) == {"answer": 3, "a.b": 1, "hint": "b"}


def test_a_conversation_is_no_text_and_own_rows_carry_no_column_of_their_contract() -> None:
    row = {"messages": [{"role": "user", "content": "Why?"}], "reference": "1", "task": "t", "difficulty": 3}
    (made,) = first_rows(source_of("t", [row]), "prompts", adapter="prompts", limit=5).rows
    assert (made["form"], made["columns"]) == ("messages", '{"difficulty":3}')
    assert made["prompt_id"].startswith("prompt-")


def test_columns_that_are_too_long_for_rewards_are_refused_by_name() -> None:
    (lost,) = read({**ROW, "long": "x" * MAX_BYTES}, {"prompt": "problem"}).rejected
    assert lost.field == "long"
    assert "'long' is the longest: name it in drop_columns" in lost.reason


@pytest.mark.parametrize(
    ("answer", "text"),
    [(Decimal("0.50"), "0.5"), (Decimal("27.00"), "27"), (Decimal("1E+3"), "1000"), (2**80, str(2**80)), (27.0, "27")],
)
def test_every_number_of_a_file_is_an_answer_and_reaches_rewards(answer: Any, text: str) -> None:
    (made,) = read({"problem": "Why?", "answer": answer}, {"prompt": "problem", "reference": "answer"}).rows
    assert made["reference"] == text
    assert Decimal(json.loads(made["columns"])["answer"]) == answer


@pytest.mark.parametrize(("answer", "reason"), [(2, "is the choice C"), (1, ""), ("C", "is the choice C"), ("B", "")])
def test_an_answer_is_one_of_the_choices_of_its_question(answer: int | str, reason: str) -> None:
    letter = "answer|letter" if isinstance(answer, int) else "answer"
    batch = read({**ROW, "answer": answer}, {"prompt": "{problem}\n{choices|letters}", "reference": letter})
    assert [row["reference"] for row in batch.rows] == ([] if reason else ["B"])
    assert [one.reason for one in batch.rejected] == ([f"{reason}, and the question has A, B"] if reason else [])


def test_rows_that_differ_in_other_columns_alone_have_one_id() -> None:
    ids = {read({**ROW, "index": n}, {"prompt": "problem"}).rows[0]["prompt_id"] for n in range(3)}
    assert len(ids) == 1


def turns(*texts: str) -> list[dict[str, str]]:
    return [{"role": {"s": "system", "u": "user", "a": "assistant"}[text[0]], "content": text} for text in texts]


@pytest.mark.parametrize(
    ("prompt", "answer", "question"),
    [
        (["u1"], ["a1"], ["u1"]),
        (["s", "u1"], ["u1", "a1"], ["s", "u1"]),  # the conversation repeats the question without its system turn
        (["u1"], ["s", "u1", "a1"], ["s", "u1"]),
        (["s", "u1"], ["a1", "u2", "a2"], ["s", "u1", "a1", "u2"]),
        (["s"], ["u1", "a1"], ["s", "u1"]),
    ],
)
def test_no_turn_is_lost_if_answers_have_turns_of_their_own(
    prompt: list[str], answer: list[str], question: list[str]
) -> None:
    row = {"prompt": turns(*prompt), "completion": turns(*answer)}
    (made,) = read(row, {"prompt": "prompt", "completion": "completion"}, "demonstrations").rows
    assert (made["messages"], made["completion"]) == (turns(*question), answer[-1])
    row = {"prompt": turns(*prompt), "chosen": turns(*answer), "rejected": turns(*answer[:-1], "a9")}
    (pair,) = read(row, {name: name for name in row}, "preferences").rows
    assert (pair["messages"], pair["chosen"], pair["rejected"]) == (turns(*question), answer[-1], "a9")


NULLS = {"empty": None, "e.f": None, "extra": {"none": None, "nulls": ["a", None]}, "problem": "Why?"}


@pytest.mark.parametrize(
    ("expression", "field"),
    [
        ("empty", "empty"),
        ("empty|hashes", "empty"),
        ("e.f", "e.f"),
        ("{problem} {empty}", "empty"),
        ("extra.none", "extra.none"),
        ("extra.none.0.answer", "extra.none"),
        ("extra.nulls.*", "extra.nulls.1"),
    ],
)
def test_null_is_a_fault_of_the_row_unless_the_expression_ends_in_a_question_mark(expression: str, field: str) -> None:
    with pytest.raises(RowError, match="is null; a mapping allows that") as caught:
        parse(expression).read(NULLS)
    assert caught.value.field == field
    path, bar, filters = expression.partition("|")
    optional = expression.replace("}", "?}") if "{" in expression else f"{path}?{bar}{filters}"
    parse(optional.replace("{problem?}", "{problem}")).read(NULLS)


@pytest.mark.parametrize("winner", [1, 1.0, True, "1", "1.0", "True"])
def test_a_winner_is_known_in_each_type_that_files_give_a_number(winner: object) -> None:
    columns = {"prompt": "q", "response_a": "a", "response_b": "b", "winner": "w", "winner_a": 0, "winner_b": 1}
    row = {"q": "Why?", "a": "x", "b": "y", "w": winner}
    (pair,) = read(row, columns, "preferences").rows
    assert (pair["chosen"], pair["rejected"]) == ("y", "x")
    (lost,) = read({**row, "w": None}, {**columns, "winner": "w?"}, "preferences").rejected
    assert lost.reason == "left out: a tie is no pair"


def test_labels_of_a_table_are_booleans() -> None:
    rows = [{"p": "Why?", "c": answer, "l": label} for answer, label in (("x", "True"), ("y", "False"))]
    columns = {"prompt": "p", "completion": "c", "score": "l"}
    (pair,) = first_rows(source_of("t", rows), "preferences", adapter="columns", columns=columns, limit=5).rows
    assert (pair["chosen"], pair["rejected"]) == ("x", "y")


def test_a_name_may_be_a_float_or_in_a_list_of_one_and_is_never_nan() -> None:
    columns = {"prompt": "problem", "id": "n", "task": "t"}
    (made,) = read({**ROW, "n": 3.0, "t": ["math"]}, columns).rows
    assert (made["prompt_id"], made["task"]) == ("3", "math")
    (lost,) = read({**ROW, "n": float("nan"), "t": "x"}, columns).rejected
    assert (lost.field, lost.reason) == ("n", "must be finite")


@pytest.mark.parametrize("text", ['["\\ud83d"]', "[NaN]", '{"a": 1, "a": 2}', "[" * 50 + "]" * 50, "["])
def test_json_within_a_text_is_as_strict_as_a_row(text: str) -> None:
    (lost,) = read({"p": text}, {"prompt": "p|json"}).rejected
    assert lost.field == "p"
    assert lost.reason.startswith("is no JSON: ")


@pytest.mark.parametrize(
    ("prompt", "form"),
    [("Why?", "text"), ("\n\nHuman: Why?\n\nAssistant: So.\n\nHuman: And?\n\nAssistant: ", "messages")],
)
def test_the_form_is_that_of_the_question_and_not_of_other_columns(prompt: str, form: str) -> None:
    row = {"prompt": prompt, "messages": turns("u", "a")}
    columns = {"prompt": "prompt|transcript" if form == "messages" else "prompt"}
    assert [made["form"] for made in read(row, columns).rows] == [form]


@pytest.mark.parametrize(
    "found",
    [
        [{"role": "system", "content": " "}, *turns("u", "a")],
        [{**turn, "from": None, "value": None} for turn in turns("u", "a")],
        [{"role": None, "content": None, "from": turn["role"], "value": turn["content"]} for turn in turns("u", "a")],
    ],
)
def test_blank_system_turns_and_null_keys_of_the_other_spelling_are_none(found: list[dict[str, Any]]) -> None:
    (made,) = read({"m": found}, {"prompt": "m"}, "demonstrations").rows
    assert (made["messages"], made["completion"]) == (turns("u"), "a")
