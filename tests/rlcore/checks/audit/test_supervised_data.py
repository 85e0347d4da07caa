"""Demonstrations, labels and pairs are those of their rows, and answers belong to their prompts."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rlcore.errors import DataError, TrainingError
from rlcore.evaluation.intervals import accuracy
from rlcore.hardware.precision import set_compute_dtype
from rlcore.models.heads import ScalarHeadModel, score_rewards
from rlcore.text.demonstrations import Demonstration, render_conversation
from rlcore.text.tokenization import ChatTokenizer
from rlcore.training.audit.shuffle_gap import (
    RareWordMatches,
    ShuffleGap,
    match_rare_words,
    measure_shuffle_gap,
    require_rare_word_matches,
    require_shuffle_gap,
)
from rlcore.training.audit.supervised_data import (
    label_noise,
    require_demonstrations,
    require_gold_pairs,
    require_labels,
    require_last_token,
)
from rlcore.training.sft import SftLearner, run_sft_steps
from rlcore.types import Message
from tests import strategies
from tests.rlcore.training.test_sft import config, echo_sequences, whole

QUESTION = (Message(role="user", content="3+4"),)

LONGER = (*QUESTION, Message(role="assistant", content="7"), Message(role="user", content="+2"))

ROWS = [(QUESTION, "seven"), (LONGER, "nine"), ((Message(role="user", content="1+1"),), "two")]


def made(tokenizer: ChatTokenizer) -> list[Demonstration]:
    return [render_conversation(tokenizer, messages, answer) for messages, answer in ROWS]


def test_demonstrations_of_one_turn_and_of_several_are_left_alone(tokenizer: ChatTokenizer) -> None:
    require_demonstrations(ROWS, made(tokenizer), tokenizer)


def without_end(one: Demonstration) -> Demonstration:
    ids = one.sequence.completion_ids[:-1]
    return Demonstration(
        sequence=dataclasses.replace(one.sequence, completion_ids=ids), loss_mask=one.loss_mask[: len(ids)]
    )


CHANGES: dict[str, tuple[Callable[[list[Demonstration]], list[Demonstration]], str]] = {
    "no end": (lambda them: [without_end(one) for one in them], "the end of a turn is not trained on"),
    "shifted": (
        lambda them: [dataclasses.replace(one, loss_mask=(*one.loss_mask[1:], False)) for one in them],
        "the end of a turn is not trained on",
    ),
    "rotated": (lambda them: [them[-1], *them[:-1]], "its row has 'seven'"),
    "fewer": (lambda them: them[1:], "2 demonstrations were made of 3 rows"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_demonstration_that_is_not_its_row_is_named(name: str, tokenizer: ChatTokenizer) -> None:
    change, says = CHANGES[name]
    with pytest.raises(DataError, match=says):
        require_demonstrations(ROWS, change(made(tokenizer)), tokenizer)


def test_label_noise_is_the_share_of_sure_judgements_against_the_label() -> None:
    # Judges are sure at 0.9 on average: 6 pairs count for their label, 2 against it, and one for neither.
    noise = label_noise([2.2] * 3 + [2.1973] * 3 + [-2.3] * 2 + [0.1])
    assert noise.num_pairs == 9
    assert label_noise([2.2] * 6 + [-2.3] * 2).fraction == pytest.approx(0.25)
    assert label_noise([]).fraction == 0.0


def test_labels_are_refused_beyond_chance_alone() -> None:
    some, many = label_noise([2.2] * 6 + [-2.3] * 2), label_noise(([2.2] * 6 + [-2.3] * 2) * 50)
    for noise, bound in ((some, 0.1), (many, 0.25), (many, 1.0), (label_noise([]), 1.0)):
        require_labels(noise, bound)
    with pytest.raises(DataError, match="25% of the labels look wrong"):
        require_labels(many, 0.15)


@pytest.mark.parametrize("margins", [[], [float("nan")] * 50], ids=["no audit", "no numbers"])
def test_a_bound_on_labels_that_nobody_has_judged_is_not_kept(margins: list[float]) -> None:
    with pytest.raises(DataError, match="no judge is sure of any"):
        require_labels(label_noise(margins), 0.3)


def test_judges_that_guess_are_reported_and_stop_nothing() -> None:
    guesses = label_noise([1.0, 3.0, -1.0, -3.0] * 50)
    require_labels(guesses, 1.0)
    assert str(guesses) == "label_noise=0.50 ci95=[0.40,0.60] n=200; the audit cannot tell a label from its opposite"
    assert str(label_noise([1.0, 3.0] * 50)) == "label_noise=0.00 ci95=[0.00,0.07] n=100"


def test_a_reward_that_is_not_read_at_the_last_token_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ScalarHeadModel.with_random_head(strategies.tiny_llama(), torch.Generator().manual_seed(1))
    sequences = strategies.random_sequences(2, max_tokens=5)
    require_last_token(model, score_rewards(model, sequences, tokens_per_microbatch=64), sequences)
    scores = ScalarHeadModel._scalars
    monkeypatch.setattr(ScalarHeadModel, "_scalars", lambda self, batch, at: scores(self, batch, (at - 1).clamp(min=0)))
    early = score_rewards(model, sequences, tokens_per_microbatch=64)
    monkeypatch.undo()
    with pytest.raises(TrainingError, match="read at its last token it is"):
        require_last_token(model, early, sequences)


def test_rewards_are_compared_in_the_precision_that_the_backbone_computes_in() -> None:
    backbone = strategies.tiny_llama()  # its weights stay float32, as those of a backbone that learns
    model = ScalarHeadModel.with_random_head(backbone, torch.Generator().manual_seed(1))
    model.head.weight.data.mul_(20.0)
    sequences = strategies.random_sequences(2, max_tokens=5)
    for dtype, is_found in ((torch.float32, True), (torch.bfloat16, False)):
        set_compute_dtype(backbone, dtype)
        rounded = 1.02 * score_rewards(model, sequences, tokens_per_microbatch=64)
        with pytest.raises(TrainingError, match="read at its last token") if is_found else contextlib.nullcontext():
            require_last_token(model, rounded, sequences)


@pytest.mark.parametrize(
    ("right", "of", "said"),
    [(40, 50, ""), (8, 10, "may be guessing"), (25, 50, "may be guessing"), (5, 50, "prefers the losers")],
)
def test_known_winners_have_to_be_found_more_often_than_by_a_coin(right: int, of: int, said: str) -> None:
    found = accuracy([place < right for place in range(of)])
    if not said:
        return require_gold_pairs(found)
    with pytest.raises(DataError, match=f"{right / of:.2f} .*: the reward model {said}"):
        require_gold_pairs(found)
    return None


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
def test_rows_that_cannot_show_their_pairs_have_no_finding(name: str) -> None:
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
    settings = config(num_steps=30)
    run_sft_steps(SftLearner(model, settings), turn(shown), held_out, settings, seed=0, report=lambda *_: None)
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
