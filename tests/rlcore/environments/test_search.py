"""Search: the formula by hand, ties in the corpus's order, and the same answer every time."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.environments.base import ToolOutput
from rlcore.environments.search import Passage, SearchTool
from rlcore.errors import DataError

TEXTS = ("the cat sat", "the dog ran far away", "a cat and a cat")


def tool(*texts: str, num_passages: int = 3) -> SearchTool:
    return SearchTool(
        [Passage(passage_id=f"p{i}", text=text) for i, text in enumerate(texts)], num_passages=num_passages
    )


def test_scores_are_those_of_the_formula() -> None:
    # "cat" stands in 2 of 3 passages: idf = ln(1 + 1.5 / 2.5) = 0.4700. Lengths 3, 5, 5, mean 13/3.
    # p0: f = 1, norm = 1.2 * (0.25 + 0.75 * 3 / 4.3333) = 0.92308, 1 * 2.2 / 1.92308 = 1.1440 -> 0.53769
    # p2: f = 2, norm = 1.2 * (0.25 + 0.75 * 5 / 4.3333) = 1.33846, 2 * 2.2 / 3.33846 = 1.31797 -> 0.61945
    ranked = tool(*TEXTS).rank("Cat?")
    assert [passage.passage_id for passage, _ in ranked] == ["p2", "p0"]
    assert [score for _, score in ranked] == pytest.approx([0.61945, 0.53769], abs=1e-4)
    assert math.log(1.6) == pytest.approx(0.4700, abs=1e-4)


def test_the_answer_names_each_passage_on_a_line() -> None:
    answers = tool("one\n two", "two three", num_passages=1)(["TWO", "three", "four", " ?! "])
    assert answers == [
        ToolOutput(text="[p0] one two"),
        ToolOutput(text="[p1] two three"),
        ToolOutput(text="nothing found"),
        ToolOutput(text="error: a query needs a word", is_error=True),
    ]


def test_an_empty_corpus_is_refused() -> None:
    with pytest.raises(DataError, match="no passage"):
        tool()


@given(
    texts=st.lists(st.text(alphabet="ab c", min_size=1), min_size=1, max_size=8),
    query=st.text(alphabet="ab c"),
    count=st.integers(1, 4),
)
def test_the_best_come_first_and_equals_in_the_order_of_the_corpus(texts: list[str], query: str, count: int) -> None:
    ranked = tool(*texts, num_passages=count).rank(query)
    assert len(ranked) <= count
    assert ranked == sorted(ranked, key=lambda item: (-item[1], int(item[0].passage_id[1:])))
    assert all(score > 0.0 for _, score in ranked)
    everything = tool(*texts, num_passages=99).rank(query)
    assert everything[: len(ranked)] == ranked
