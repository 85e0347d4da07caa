"""The task for a database, and demonstrations that ask it."""

from __future__ import annotations

import random

import pytest

from data_contracts import stock
from data_contracts.splits import is_held_out
from data_contracts.text import prompt_hash


def rows(direct_share: float, count: int = 40) -> list[dict[str, object]]:
    return stock.generate_demonstrations(random.Random(0), num_train=count, num_eval=4, direct_share=direct_share)


def test_a_question_has_a_table_of_its_own_that_holds_its_answer() -> None:
    table = stock.table("price where id=481")
    (row,) = (row for row in table if row[0] == 481)
    assert stock.answer("price where id=481") == row[stock.COLUMNS.index("price")]
    assert stock.table("price where id=481") == table
    assert len({each[0] for each in table}) == len(table) > 6
    assert stock.table("count where id=481") != table
    assert {len(each) for each in table} == {len(stock.COLUMNS)}


def test_answers_do_not_follow_from_questions() -> None:
    prompts = stock.generate_prompts(random.Random(0), num_train=2000, num_eval=0)
    counts = [sum(row["reference"] == str(number) for row in prompts) for number in range(10, 100)]
    assert sum(counts) == 2000
    assert max(counts) < 2.5 * 2000 / 90  # a guess is right about once in ninety times


def test_an_asked_demonstration_runs_a_query_and_repeats_its_answer() -> None:
    question, call, said = rows(0.0)[0]["messages"]
    column, _, article = question["content"].partition(" where id=")
    assert call["content"] == f"<tool:query>SELECT {column} FROM stock WHERE id={article}</tool>"
    assert said == {"role": "tool", "content": str(stock.answer(question["content"]))}
    assert rows(0.0)[0]["completion"] == f"#### {said['content']}"


def test_the_share_of_guesses_is_as_asked() -> None:
    assert {len(row["messages"]) for row in rows(1.0)} == {1}
    mixed = [len(row["messages"]) for row in rows(0.6, count=1000)]
    assert sum(length == 1 for length in mixed) / len(mixed) == pytest.approx(0.6, abs=0.05)


def test_questions_are_different_and_held_out_by_their_words_alone() -> None:
    prompts = stock.generate_prompts(random.Random(1), num_train=200, num_eval=30)
    assert len({row["prompt_id"] for row in prompts}) == 230
    made = [*prompts, *rows(0.5)]
    assert all(is_held_out(prompt_hash(row["messages"])) == (row["split"] == "eval") for row in made)
