"""Answers that were moved against their prompts are found by their words; sound sets of any kind are left alone."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

from rlcore.checks.audit.shuffle_gap import (
    RareWordMatches,
    ShuffleGap,
    match_rare_words,
    measure_shuffle_gap,
    require_rare_word_matches,
    require_shuffle_gap,
)
from rlcore.errors import DataError
from rlcore.text.demonstrations import Demonstration
from rlcore.training.sft import train_sft
from rlcore.types import Message
from tests import strategies
from tests.rlcore.training.test_sft import config, echo_sequences, whole

Row = tuple[tuple[Message, ...], str]


def asked(text: str) -> tuple[Message, ...]:
    return (Message(role="user", content=text),)


def stories(count: int) -> list[Row]:
    """Questions about three names each, with answers that repeat them."""
    names = [f"name{number}" for number in range(3 * count)]
    each = [names[3 * number : 3 * number + 3] for number in range(count)]
    return [(asked(f"Who are {', '.join(three)}?"), f"They are friends: {', '.join(three)}.") for three in each]


def moved(rows: list[Row], by: int = 1) -> list[Row]:
    return [(messages, rows[place - by][1]) for place, (messages, _) in enumerate(rows)]


def exchanged(rows: list[Row]) -> list[Row]:
    return [
        (messages, answer)
        for (messages, _), (_, answer) in zip(rows, random.Random(0).sample(rows, len(rows)), strict=True)
    ]


@pytest.mark.parametrize("change", [moved, exchanged])
def test_answers_beside_other_prompts_are_refused(change: Any) -> None:
    with pytest.raises(DataError, match=r"100 answers share rare words with one prompt, but only [0-4] with their own"):
        require_rare_word_matches(match_rare_words(change(stories(100))), 0.25)
    require_rare_word_matches(match_rare_words(change(stories(100))), 0.0)
    require_rare_word_matches(match_rare_words(stories(60)), 0.25)


SOUND: dict[str, list[Row]] = {
    "sums": [(asked(f"{a}+{b}"), f"so #### {a + b}") for a in range(10) for b in range(10)],
    "one answer to everything": [(asked(f"question{number} and name{number}"), "#### 7") for number in range(100)],
    "random words": [
        (asked(" ".join(map(str, random.Random(n).sample(range(100, 999), 9)))), str(random.Random(-n).random()))
        for n in range(100)
    ],
    "few rows": moved(stories(40)),
    "none": [],
    "several answers to each prompt": [row for row in stories(60) for _ in range(3)],
    "a conversation, a row for each of its answers": [
        (tuple(message for messages, _ in stories(60)[: end + 1] for message in messages), stories(60)[end][1])
        for end in range(60)
    ],
}


@pytest.mark.parametrize("name", SOUND)
def test_a_set_that_says_nothing_of_its_pairs_is_left_alone(name: str) -> None:
    require_rare_word_matches(match_rare_words(SOUND[name]), 0.25)


def test_a_tenth_that_stands_elsewhere_is_no_proof_and_many_are_needed() -> None:
    rows = stories(100)
    found = match_rare_words(moved(rows[:10]) + rows[10:])
    assert found == RareWordMatches(num_found=100, num_aligned=90)
    require_rare_word_matches(found, 0.25)
    require_rare_word_matches(RareWordMatches(num_found=48, num_aligned=0), 0.25)
    with pytest.raises(DataError):
        require_rare_word_matches(RareWordMatches(num_found=49, num_aligned=0), 0.25)


def rotated(demonstrations: list[Demonstration]) -> list[Demonstration]:
    answers = [one.sequence.completion_ids for one in demonstrations]
    return [
        dataclasses.replace(one, sequence=dataclasses.replace(one.sequence, completion_ids=answers[place - 1]))
        for place, one in enumerate(demonstrations)
    ]


@pytest.mark.parametrize("turn", [list, rotated])
def test_answers_are_likelier_after_their_own_prompts_unless_they_were_exchanged(turn: Any) -> None:
    model, shown, held_out = strategies.tiny_llama(), whole(echo_sequences(200, 0)), whole(echo_sequences(200, 9))
    train_sft(model, turn(shown), held_out, config(num_steps=30), seed=0, report=lambda *_: None)
    found = measure_shuffle_gap(model, turn(held_out), tokens_per_microbatch=256, seed=0)
    assert found.num_rows >= 16
    assert found.is_significant is (turn is list)
    assert ("too small" in str(found)) is (turn is rotated)
    if turn is rotated:
        with pytest.raises(DataError, match="min_shuffle_gap = 1 is above"):
            require_shuffle_gap(found, 1.0)
    else:
        require_shuffle_gap(found, 1.0)
    require_shuffle_gap(found, 0.0)


def test_a_gap_is_refused_where_its_interval_excludes_what_is_asked_for() -> None:
    found = ShuffleGap(gap=0.035, error=0.014, num_rows=100)
    for least in (0.0, 0.035, 0.09):
        require_shuffle_gap(found, least)
    assert str(found).startswith("shuffle_gap=0.035 nats/token ci95=[0.008,0.062]")
    with pytest.raises(DataError, match=r"min_shuffle_gap = 0\.1 is above the upper bound 0\.091"):
        require_shuffle_gap(found, 0.1)


def test_what_cannot_be_compared_is_refused_where_a_gap_is_asked_for() -> None:
    few = ShuffleGap(gap=0.5, error=0.01, num_rows=15)
    require_shuffle_gap(few, 0.0)
    with pytest.raises(DataError, match=r"min_shuffle_gap = 0\.1 needs at least 16"):
        require_shuffle_gap(few, 0.1)
    lost = ShuffleGap(gap=float("nan"), error=0.01, num_rows=100)
    require_shuffle_gap(lost, 0.0)
    with pytest.raises(DataError, match=r"min_shuffle_gap = 0\.1 is above"):
        require_shuffle_gap(lost, 0.1)


def test_one_answer_to_everything_has_no_gap() -> None:
    same = [
        dataclasses.replace(one, sequence=dataclasses.replace(one.sequence, completion_ids=(7, 2)))
        for one in whole(echo_sequences(40, 0))
    ]
    found = measure_shuffle_gap(strategies.tiny_llama(), same, tokens_per_microbatch=256, seed=0)
    assert (found.num_rows, found.is_significant) == (0, False)
    require_shuffle_gap(found, 0.0)
