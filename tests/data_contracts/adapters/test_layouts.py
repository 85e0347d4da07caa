"""Public layouts: their rows, their mistakes, and their recognition."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from rlcore.data_contracts.adapters.convert import contract_of, first_rows
from rlcore.data_contracts.adapters.expressions import FILTERS
from rlcore.data_contracts.adapters.layouts import LAYOUTS
from rlcore.data_contracts.adapters.recognition import fits
from rlcore.data_contracts.adapters.table import ADAPTERS
from rlcore.data_contracts.adapters.targets import TARGETS, Kind, parse_columns
from rlcore.data_contracts.gate.reading import source_of
from rlcore.data_contracts.gate.records import Quarantined
from rlcore.data_contracts.gate.stream import Batch
from tests.layout_rows import EXAMPLES, asked, bad, bot, good, user

ROOT = Path(__file__).resolve().parents[3]
SCORES = ("score_chosen", "score_rejected")
LIKE_ANOTHER = {"dapo": "verl"}  # DAPO's file is one of verl's


def read(adapter: str, kind: Kind, *rows: dict[str, Any], **columns: Any) -> Batch:
    return first_rows(source_of("t", list(rows)), kind, adapter=adapter, columns=columns, limit=100)


def refused(adapter: str, kind: Kind, *rows: dict[str, Any], **columns: Any) -> Quarantined:
    (one,) = read(adapter, kind, *rows, **columns).rejected
    return one


def test_every_layout_has_an_example() -> None:
    assert {example.adapter for example in EXAMPLES.values()} == set(LAYOUTS)


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_layout_gives_rows_of_its_contract_in_every_kind(name: str) -> None:
    example = EXAMPLES[name]
    first, *others = ADAPTERS[example.adapter].rows
    found = read(example.adapter, first, *example.rows(7))
    assert found.rejected == []
    assert len(found.rows) == 1
    assert {key: found.rows[0][key] for key in example.first} == example.first
    for kind in others:
        assert read(example.adapter, kind, *example.rows(7)).rows
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
            found = read(EXAMPLES[name].adapter, kind, *({**row, column: None} for row in rows))
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
    lost = read(best.adapter, "preferences", *map(row, range(50))).rejected
    assert [one.reason.partition(": ")[2] for one in lost] == ["the sides are swapped"] * num_swapped


def test_answers_to_one_prompt_in_several_rows_become_pairs_by_their_scores() -> None:
    rows = [
        {"prompt": "Why?", "completion": text, "label": label} for text, label in (("a", True), ("b", True), ("c", 0))
    ]
    pairs = read("trl_kto", "preferences", *rows, {"prompt": "Alone?", "completion": "x", "label": True})
    assert [(pair["chosen"], pair["rejected"]) for pair in pairs.rows] == [("a", "c"), ("b", "c")]
    assert len({pair["set_id"] for pair in pairs.rows}) == 1
    assert [one.reason for one in pairs.rejected] == ["left out: all completions are tied, so no pair follows"]


def test_a_tree_of_messages_gives_the_whole_conversation_before_each_reply() -> None:
    rows = EXAMPLES["oasst1"].rows(7)
    more = {**rows[0], "message_id": "d", "parent_id": "7-c", "text": "Sure?"}
    last = {**rows[1], "message_id": "e", "parent_id": "d", "text": "Yes.", "rank": None}
    found = read("oasst1", "demonstrations", *rows, more, last)
    assert found.rows[1]["messages"] == [user(asked(7)), bot(good(7)), user("Sure?")]
    assert [row["completion"] for row in found.rows] == [good(7), "Yes."]
    assert refused("oasst1", "demonstrations", {"message_id": 3}).field == "message_id"


@pytest.mark.parametrize("answer", ["proof", "notfound", "Not found", "N/A"])
def test_what_says_that_there_is_no_answer_is_no_reference(answer: str) -> None:
    one = refused("problems", "prompts", {"problem": "Why?", "answer": answer})
    assert (one.field, one.reason) == ("answer", "is no answer, so it cannot be a reference")


@pytest.mark.parametrize(("answer", "text"), [(27, "27"), (27.0, "27"), (0.5, "0.5"), (-3, "-3"), ("1/2", "1/2")])
def test_a_number_is_a_reference_as_its_text(answer: object, text: str) -> None:
    (row,) = read("problems", "prompts", {"problem": "Why?", "answer": answer}).rows
    assert row["reference"] == text


@pytest.mark.parametrize(
    ("answer", "text"),
    [("#### 1,048", "1048"), ("#### 1,234,567", "1234567"), ("#### -12", "-12"), ("#### 3.5", "3.5")],
)
def test_only_separators_of_thousands_are_dropped(answer: str, text: str) -> None:
    (row,) = read("gsm8k", "prompts", {"question": "Why?", "answer": answer}).rows
    assert row["reference"] == text


@pytest.mark.parametrize("answer", ["#### 27,5", "#### 1,2,3", "#### 12,5000", "#### 1234,567,8"])
def test_a_decimal_comma_is_refused(answer: str) -> None:
    one = refused("gsm8k", "prompts", {"question": "Why?", "answer": answer})
    assert one.field == "answer"
    assert "write a decimal point" in one.reason


def test_a_conversation_is_asked_up_to_the_users_last_turn() -> None:
    turns = [{"from": "system", "value": "Be kind."}, {"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]
    (row,) = read("sharegpt", "prompts", {"conversations": [*turns, {"from": "human", "value": "Why?"}, turns[2]]}).rows
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
    (row,) = read("messages", "prompts", {"messages": [turn]}).rows
    assert row["messages"] == [user("What now?")]


def test_an_unanswered_pair_of_texts_has_a_whole_word_in_front() -> None:
    one = refused("trl_preference_implicit", "preferences", {"chosen": "blue", "rejected": "black"})
    assert one.reason == "left out: the answers share no beginning, so there is no prompt"
    assert bad(7) != good(7)


def test_the_page_has_all_targets_and_filters() -> None:
    page = (ROOT / "docs" / "layouts.md").read_text(encoding="utf-8")
    missing = {name for targets in TARGETS.values() for name in targets if f"`{name}`" not in page}
    assert not missing | {name for name in FILTERS if f"`{name}`" not in page}
