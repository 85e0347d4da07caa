"""Evaluation prompts among training rows: shared words, near duplicates, and questions in a history."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.data_contracts.contracts.datasets import DEMONSTRATIONS
from rlcore.data_contracts.gate.eval_leakage import FEWEST_WORDS, MAX_NEAR, NGRAM_WORDS, Overlap, texts_of
from rlcore.data_contracts.gate.near_duplicates import (
    MAX_BUCKET,
    bands_of,
    candidates,
    is_near_duplicate,
    numbers_of,
    packed,
)
from rlcore.data_contracts.text import question_text, words_of
from tests.data_contracts.gate.gating import Gated, gate_rows

LOOSE: dict[str, Any] = {"max_tokens": 60, "max_quarantined": 1.0}
COWS = "A farmer has 12 cows and sells 5 of them"


def conversation(*turns: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[place % 2], "content": turn} for place, turn in enumerate(turns)]


def prompt(name: str, *turns: str, **changes: Any) -> dict[str, Any]:
    return {"prompt_id": name, "messages": conversation(*turns), "reference": "7", "task": "t", **changes}


def others(**changes: Any) -> list[dict[str, Any]]:
    names = ["Paris", "London", "Rome", "Madrid", "Vienna", "Oslo"]
    return [prompt(name, f"Tell me about {name} and the people of {name}", **changes) for name in names]


def apart(result: Gated) -> float:
    (rule,) = [one for one in result.report.rules if one.name == "eval_prompts_are_apart"]
    return rule.value


def test_a_row_that_is_near_is_quarantined_where_the_source_divides_its_rows_and_says_near_what() -> None:
    rows = [*others(split="train"), prompt("near", f"Well {COWS}", split="train"), prompt("held", COWS, split="eval")]
    result = gate_rows(rows, "prompts", **LOOSE)
    (bad,) = result.quarantine
    assert (bad.origin.line, bad.field, bad.reason) == (7, "messages", "is nearly a prompt that is evaluated on")
    assert bad.excerpt == f"'Well {COWS}' and '{COWS}' in line 8"
    assert apart(result) == 1.0
    assert not gate_rows(rows, "prompts", keeps_apart=False, **LOOSE).quarantine


def test_all_rows_of_a_prompt_that_is_near_go() -> None:
    near = [prompt(f"n{place}", text, split="train") for place, text in enumerate([f"Well {COWS}", f"well, {COWS}?"])]
    result = gate_rows([*others(split="train"), *near, prompt("held", COWS, split="eval")], "prompts", **LOOSE)
    assert [one.origin.line for one in result.quarantine] == [7, 8]


def test_a_row_that_is_near_is_held_out_where_we_divide() -> None:
    for place in range(7):
        rows = others()
        rows.insert(place, prompt("near", f"Well {COWS}"))
        result = gate_rows(rows, "prompts", evaluated=[conversation(COWS)], **LOOSE)
        assert not result.quarantine
        assert apart(result) == 1.0
        assert result.kept.set_index("prompt_id").loc["near", "split"] == "eval"


def test_a_question_in_a_history_is_found_by_its_own_key_and_a_greeting_is_no_question() -> None:
    history = prompt("leak", COWS.upper(), "Seven.", "Are you sure?", split="train")
    result = gate_rows([*others(split="train"), history, prompt("held", COWS, split="eval")], "prompts", **LOOSE)
    (bad,) = result.quarantine
    assert bad.reason == "has an evaluation prompt in its history"
    greeting = prompt("fine", "Hi there", "Hello.", "Are you sure?", split="train")
    rows = [*others(split="train"), greeting, prompt("held", "Hi there!", split="eval")]
    assert not gate_rows(rows, "prompts", **LOOSE).quarantine


@pytest.mark.parametrize("number", [MAX_NEAR, MAX_NEAR + 1])
def test_a_prompt_that_many_are_near_is_a_template_and_the_report_warns(number: int) -> None:
    words = ["red", "blue", "green", "brown", "grey", "pink", "white", "black", "orange"]
    near = [prompt(word, f"A farmer has {word} cows and sells them all", split="train") for word in words[:number]]
    rows = [*near, *others(split="train"), prompt("held", "A farmer has cows and sells them all", split="eval")]
    result = gate_rows(rows, "prompts", **LOOSE)
    is_template = number > MAX_NEAR
    assert len(result.quarantine) == (0 if is_template else number)
    warnings = " ".join(result.report.warnings)
    assert ("1 prompts that are evaluated on are like many others" in warnings) is is_template


def test_rows_that_are_refused_are_compared_with_nothing() -> None:
    rows = [*others(split="train"), prompt("near", f"Well {COWS}", split="train")]
    result = gate_rows([*rows, prompt("held", COWS, split="eval", task="")], "prompts", **LOOSE)
    assert [one.reason for one in result.quarantine] == ["must not be blank"]


def test_a_refusal_for_rows_that_are_near_says_what_to_set_where_they_are_not() -> None:
    rows = [*others(split="train"), prompt("near", f"Well {COWS}", split="train"), prompt("held", COWS, split="eval")]
    (error,) = gate_rows(rows, "prompts", max_tokens=60, max_quarantined=0.0).report.errors
    assert error.endswith("(where they are different questions, set near_duplicates = 'ignore')")


def tokens(text: str) -> list[str]:
    return question_text(text).split()


@pytest.mark.parametrize(
    ("one", "other", "near"),
    [
        ("A farmer has 12 cows", "A farmer has 12 cows left", True),
        ("A farmer has 12 cows", "A poor farmer has 12 cows", True),
        ("A farmer has 12 cows", "A farmer has cows", False),  # a number less
        ("A farmer has 12 cows", "A farmer has 13 cows", False),
        ("A farmer has 12 cows", "A baker has 12 cows", False),  # a word for another, of four
        ("4 + 3", "4 - 3", False),
        ("4 + 3", "4 + 3", True),
        ("solve for x in this", "solve for y in this", False),
        ("a b c d e f g h", "h g f e d c b a", False),
        ("", "word", True),
    ],
)
def test_questions_are_near_by_a_word_and_never_by_a_number_sign_or_variable(one: str, other: str, near: bool) -> None:
    assert is_near_duplicate(tokens(one), tokens(other)) is near
    assert is_near_duplicate(tokens(other), tokens(one)) is near


def test_the_longer_the_questions_the_more_words_may_differ() -> None:
    words = [f"word{place}" for place in range(60)]
    text = [word.translate(str.maketrans("0123456789", "abcdefghij")) for word in words]
    # 60 and 60 words: four may be missing or added, so two may be replaced.
    other = ["new", "other", *text[2:]]
    assert is_near_duplicate(text, other)
    assert not is_near_duplicate(text, ["third", *other[:30], *other[31:]])


def test_nearly_all_questions_with_a_word_more_are_looked_at_and_few_others() -> None:
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghij", k=6)) for _ in range(3000)]
    questions = [rng.sample(words, 8) for _ in range(1000)]
    longer = [[*one[:4], rng.choice(words), *one[4:]] for one in questions]
    found = candidates(bands_of(list(map(packed, longer))), bands_of(list(map(packed, questions))))
    pairs = set(zip(found.train.tolist(), found.held_out.tolist(), strict=True))
    assert sum((place, place) in pairs for place in range(1000)) > 990
    assert len(pairs) < 1200
    assert found.crowded == 0


def test_questions_with_other_numbers_or_without_a_word_share_no_band() -> None:
    questions = ["A farmer has 12 cows", "A farmer has 13 cows", "4+3", "", "4+3"]
    bands = bands_of([packed(tokens(question)) for question in questions])
    assert not (bands[0] == bands[1]).any()
    assert not bands[2:].any()
    assert len(candidates(bands, bands).train) == 2  # each with itself


def test_a_template_is_counted_and_not_compared_with_all() -> None:
    same = bands_of([packed(["is", "it", "so"])] * (MAX_BUCKET + 10))
    found = candidates(same, same[:1])
    assert (len(found.train), found.crowded) == (MAX_BUCKET, 1)


def test_the_numbers_of_texts_are_those_of_every_machine() -> None:
    assert numbers_of(["a", "ä"]).tolist() == [13950350942979735504, 169404545344139998]
    (bands,) = bands_of([packed(["a", "farmer", "has", "12"])]).tolist()
    assert bands[:3] == [3636725757, 3719897027, 317593263]
    assert len(set(numbers_of([str(number) for number in range(10_000)]).tolist())) == 10_000
    assert numbers_of([]).dtype == np.uint64


TEXTS = st.lists(st.lists(st.sampled_from("ab"), max_size=40).map(" ".join), max_size=6)


def ask(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_a_run_does_not_go_from_one_text_or_row_to_the_next() -> None:
    words = [f"w{place}" for place in range(NGRAM_WORDS)]
    whole, parts = " ".join(words), [" ".join(words[:6]), " ".join(words[6:])]
    overlap = Overlap([ask(whole)])
    assert overlap.see([[parts[0]], [parts[1]], parts, ["", *parts]]) == {}
    assert overlap.num_touched == 0


def test_a_row_teaches_its_turns_and_its_answer_and_not_the_instruction_of_the_system() -> None:
    turns = [{"role": role, "content": role} for role in ("system", "user", "assistant", "user")]
    row = {"messages": turns, "completion": "said"}
    assert texts_of(row, DEMONSTRATIONS) == ["user", "assistant", "user", "said"]


def touches(text: str, train: str, size: int) -> bool:
    length = min(size, len(words_of(text)))
    found, known = (
        {tuple(words[start : start + length]) for start in range(len(words) - length + 1)}
        for words in map(words_of, (text, train))
    )
    return length >= FEWEST_WORDS and bool(found & known)


@settings(deadline=None)
@given(TEXTS, TEXTS, st.integers(FEWEST_WORDS, NGRAM_WORDS))
def test_what_is_found_is_that_of_a_plain_search(held_out: list[str], train: list[str], size: int) -> None:
    overlap = Overlap([ask(text) for text in held_out], size=size)
    found = overlap.see([[text] for text in train])
    pairs = {
        (row, prompt)
        for row, text in enumerate(train)
        for prompt, other in enumerate(held_out)
        if touches(other, text, size)
    }
    assert found.keys() == {row for row, _ in pairs}
    assert {*found.items()} <= pairs
    assert overlap.num_touched == len({prompt for _, prompt in pairs})
