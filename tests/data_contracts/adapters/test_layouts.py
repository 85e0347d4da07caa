"""Layouts and mappings of columns: what they read, their mistakes, and how layouts are recognized."""

from __future__ import annotations

import json
import re
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from rlcore.data_contracts.adapters.convert import MAX_BYTES, contract_of, first_rows, stream_of
from rlcore.data_contracts.adapters.expressions import FILTERS, TARGETS, Kind, parse, parse_columns
from rlcore.data_contracts.adapters.layouts import LAYOUTS
from rlcore.data_contracts.adapters.recognition import fits
from rlcore.data_contracts.adapters.table import ADAPTERS
from rlcore.data_contracts.errors import ContractError, RowError
from rlcore.data_contracts.gate.reading import source_of
from rlcore.data_contracts.gate.records import Quarantined
from rlcore.data_contracts.gate.stream import Batch
from tests.layout_rows import EXAMPLES, asked, bad, bot, good, user

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


ROOT = Path(__file__).resolve().parents[3]
SCORES = ("score_chosen", "score_rejected")
LIKE_ANOTHER = {"dapo": "verl"}  # DAPO's file is one of verl's


def read_layout(adapter: str, kind: Kind, *rows: dict[str, Any], **columns: Any) -> Batch:
    return first_rows(source_of("t", list(rows)), kind, adapter=adapter, columns=columns, limit=100)


def refused(adapter: str, kind: Kind, *rows: dict[str, Any], **columns: Any) -> Quarantined:
    (one,) = read_layout(adapter, kind, *rows, **columns).rejected
    return one


def test_every_layout_has_an_example() -> None:
    assert {example.adapter for example in EXAMPLES.values()} == set(LAYOUTS)


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_layout_gives_rows_of_its_contract_in_every_kind(name: str) -> None:
    example = EXAMPLES[name]
    first, *others = ADAPTERS[example.adapter].rows
    found = read_layout(example.adapter, first, *example.rows(7))
    assert found.rejected == []
    assert len(found.rows) == 1
    assert {key: found.rows[0][key] for key in example.first} == example.first
    for kind in others:
        assert read_layout(example.adapter, kind, *example.rows(7)).rows
    assert len({row[contract_of(example.adapter, first).id_column] for row in found.rows}) == 1


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_layout_is_recognized_by_its_columns(name: str) -> None:
    example = EXAMPLES[name]
    rows = [row for number in range(5, 9) for row in example.rows(number)]
    best, *_ = fits(source_of("t", rows))
    assert best.adapter == LIKE_ANOTHER.get(example.adapter, example.adapter)


@pytest.mark.parametrize(
    ("adapter", "changed"),
    [
        ("arena", {"winner": "tie (bothbad)"}),
        ("arena_55k", {"winner_model_b": 0}),
        ("arena_55k", {"prompt": '["a?", "b?"]', "response_a": '["c", "d"]', "response_b": '["e", "f"]'}),
        ("helpsteer3", {"overall_preference": 0}),
        ("ultrafeedback_binarized", {"score_rejected": 8.0}),
        ("pku_saferlhf", {"better_response_id": None}),
    ],
)
def test_a_tie_is_no_pair_and_counts_against_no_limit(adapter: str, changed: dict[str, Any]) -> None:
    (example,) = [each for each in EXAMPLES.values() if each.adapter == adapter]
    assert refused(adapter, "preferences", {**example.rows(7)[0], **changed}).reason.startswith("left out: ")


@pytest.mark.parametrize("name", [name for name, example in EXAMPLES.items() if not LAYOUTS[example.adapter].gather])
def test_null_in_a_column_that_a_layout_names_refuses_the_row(name: str) -> None:
    layout, rows = LAYOUTS[EXAMPLES[name].adapter], EXAMPLES[name].rows(7)
    for kind, columns in layout.columns.items():
        read_columns = {path for each in parse_columns(columns, kind).values() for path in each.columns}
        optional = {path for value in columns.values() for path in re.findall(r"(\w+)\?", str(value))}
        for column in {path.partition(".")[0] for path in read_columns - optional}:
            found = read_layout(EXAMPLES[name].adapter, kind, *({**row, column: None} for row in rows))
            assert found.rejected, (kind, column)


def test_swapped_scores_are_refused() -> None:
    row = {**EXAMPLES["UltraFeedback binarized"].rows(7)[0], "score_chosen": 3.0, "score_rejected": 8.0}
    one = refused("ultrafeedback_binarized", "preferences", row)
    assert (one.field, one.reason) == (
        "score_chosen",
        "3 is below 8 of the rejected answer: the sides are swapped",
    )


@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize("num_swapped", [4, 50])
def test_swapped_scores_in_the_first_rows_hide_no_layout(turns: bool, num_swapped: int) -> None:
    def row(n: int) -> dict[str, Any]:
        sides = {"chosen": good(n), "rejected": bad(n)}
        whole = {side: [user(asked(n)), bot(text)] for side, text in sides.items()}
        scores = (3.0, 8.0) if n < num_swapped else (8.0, 3.0)
        return {"prompt": asked(n), **(whole if turns else sides), **dict(zip(SCORES, scores, strict=True))}

    best, *others = fits(source_of("t", [row(n) for n in range(50)]))
    assert best.adapter == "ultrafeedback_binarized"
    assert all({*SCORES} <= other.columns for other in others)
    lost = read_layout(best.adapter, "preferences", *map(row, range(50))).rejected
    assert [one.reason.partition(": ")[2] for one in lost] == ["the sides are swapped"] * num_swapped


def test_answers_to_one_prompt_in_several_rows_become_pairs_by_their_scores() -> None:
    rows = [
        {"prompt": "Why?", "completion": text, "label": label} for text, label in (("a", True), ("b", True), ("c", 0))
    ]
    pairs = read_layout("trl_kto", "preferences", *rows, {"prompt": "Alone?", "completion": "x", "label": True})
    assert [(pair["chosen"], pair["rejected"]) for pair in pairs.rows] == [("a", "c"), ("b", "c")]
    assert len({pair["set_id"] for pair in pairs.rows}) == 1
    assert [one.reason for one in pairs.rejected] == ["left out: all completions are tied, so no pair follows"]


def test_a_tree_of_messages_gives_the_whole_conversation_before_each_reply() -> None:
    rows = EXAMPLES["oasst1"].rows(7)
    more = {**rows[0], "message_id": "d", "parent_id": "7-c", "text": "Sure?"}
    last = {**rows[1], "message_id": "e", "parent_id": "d", "text": "Yes.", "rank": None}
    found = read_layout("oasst1", "demonstrations", *rows, more, last)
    assert found.rows[1]["messages"] == [user(asked(7)), bot(good(7)), user("Sure?")]
    assert [row["completion"] for row in found.rows] == [good(7), "Yes."]
    assert refused("oasst1", "demonstrations", {"message_id": 3}).field == "message_id"


@pytest.mark.parametrize("answer", ["proof", "notfound", "Not found", "N/A"])
def test_what_says_that_there_is_no_answer_is_no_reference(answer: str) -> None:
    one = refused("problems", "prompts", {"problem": "Why?", "answer": answer})
    assert (one.field, one.reason) == ("answer", "is no answer, so it cannot be a reference")


@pytest.mark.parametrize(("answer", "text"), [(27, "27"), (27.0, "27"), (0.5, "0.5"), (-3, "-3"), ("1/2", "1/2")])
def test_a_number_is_a_reference_as_its_text(answer: object, text: str) -> None:
    (row,) = read_layout("problems", "prompts", {"problem": "Why?", "answer": answer}).rows
    assert row["reference"] == text


@pytest.mark.parametrize(
    ("answer", "text"),
    [("#### 1,048", "1048"), ("#### 1,234,567", "1234567"), ("#### -12", "-12"), ("#### 3.5", "3.5")],
)
def test_only_separators_of_thousands_are_dropped(answer: str, text: str) -> None:
    (row,) = read_layout("gsm8k", "prompts", {"question": "Why?", "answer": answer}).rows
    assert row["reference"] == text


@pytest.mark.parametrize("answer", ["#### 27,5", "#### 1,2,3", "#### 12,5000", "#### 1234,567,8"])
def test_a_decimal_comma_is_refused(answer: str) -> None:
    one = refused("gsm8k", "prompts", {"question": "Why?", "answer": answer})
    assert one.field == "answer"
    assert "write a decimal point" in one.reason


def test_a_conversation_is_asked_up_to_the_users_last_turn() -> None:
    turns = [{"from": "system", "value": "Be kind."}, {"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]
    (row,) = read_layout(
        "sharegpt", "prompts", {"conversations": [*turns, {"from": "human", "value": "Why?"}, turns[2]]}
    ).rows
    assert [turn["role"] for turn in row["messages"]] == ["system", "user", "assistant", "user"]


@pytest.mark.parametrize(
    ("turn", "field"),
    [
        ({"from": "tool", "value": "x"}, "conversations.0.from"),
        ({"from": "human", "value": None}, "conversations.0.value"),
        ({"role": "assistant", "content": "x", "tool_calls": [{}]}, "conversations.0.tool_calls"),
        ({"role": "user", "content": [{"type": "image"}]}, "conversations.0.content"),
        ("Hi", "conversations"),
    ],
)
def test_what_a_text_cannot_hold_is_refused_by_its_path(turn: Any, field: str) -> None:
    one = refused("sharegpt", "prompts", {"conversations": [turn, {"from": "gpt", "value": "y"}]})
    assert one.field.startswith(field)


def test_the_text_parts_of_a_message_are_one_text() -> None:
    turn = {"role": "user", "content": [{"type": "text", "text": "What"}, {"type": "text", "text": " now?"}]}
    (row,) = read_layout("messages", "prompts", {"messages": [turn]}).rows
    assert row["messages"] == [user("What now?")]


def test_an_unanswered_pair_of_texts_has_a_whole_word_in_front() -> None:
    one = refused("trl_preference_implicit", "preferences", {"chosen": "blue", "rejected": "black"})
    assert one.reason == "left out: the answers share no beginning, so there is no prompt"
    assert bad(7) != good(7)


def test_the_page_has_all_targets_and_filters() -> None:
    page = (ROOT / "docs" / "layouts.md").read_text(encoding="utf-8")
    missing = {name for targets in TARGETS.values() for name in targets if f"`{name}`" not in page}
    assert not missing | {name for name in FILTERS if f"`{name}`" not in page}
