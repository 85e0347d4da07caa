"""The task for a database, and demonstrations that ask it."""

from __future__ import annotations

import random

from rlcore.examples import stock


def rows(direct_share: float, count: int = 40) -> list[dict[str, object]]:
    return stock.MADE.demonstrations(random.Random(0), num_train=count, num_eval=4, direct_share=direct_share)


def test_a_question_has_a_table_of_its_own_that_holds_its_answer() -> None:
    table = stock.table("price of 481")
    (row,) = (row for row in table if row[0] == 481)
    assert stock.answer("price of 481") == row[stock.COLUMNS.index("price")]
    assert stock.table("price of 481") == table
    assert len({each[0] for each in table}) == len(table) > 6
    assert stock.table("count of 481") != table
    assert {len(each) for each in table} == {len(stock.COLUMNS)}


def test_answers_do_not_follow_from_questions() -> None:
    prompts = stock.MADE.prompts(random.Random(0), num_train=2000, num_eval=0)
    counts = [sum(row["reference"] == str(number) for row in prompts) for number in range(10, 100)]
    assert sum(counts) == 2000
    assert max(counts) < 2.5 * 2000 / 90  # a guess is right about once in ninety times


def test_an_asked_demonstration_runs_a_query_and_repeats_its_answer() -> None:
    question, call, said = rows(0.0)[0]["messages"]
    column, _, article = question["content"].partition(" of ")
    assert call["content"] == f"<tool:query>SELECT {column} FROM stock WHERE id={article}</tool>"
    assert said == {"role": "tool", "content": str(stock.answer(question["content"]))}
    assert rows(0.0)[0]["completion"] == f"#### {said['content']}"
