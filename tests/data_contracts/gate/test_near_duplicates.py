"""Questions that are nearly the same."""

from __future__ import annotations

import random

import numpy as np
import pytest

from rlcore.data_contracts.gate.near_duplicates import (
    MAX_BUCKET,
    bands_of,
    candidates,
    is_near_duplicate,
    numbers_of,
    packed,
)
from rlcore.data_contracts.text import question_text


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
