"""Faults of demonstrations and labels that a supervised stage would learn in silence."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlcore.audit.data import (
    Pairing,
    label_noise,
    pairing_of,
    require_demonstrations,
    require_labels,
    require_last_token,
    require_pairing,
)
from rlcore.config import ModelConfig
from rlcore.demonstrations import Demonstration, render_conversation
from rlcore.errors import DataError, TrainingError
from rlcore.models.heads import ScalarModel, score_rewards
from rlcore.models.importing import import_model
from rlcore.tokenization import ChatTokenizer
from rlcore.training.sft import train_sft
from rlcore.types import Message
from tests import strategies
from tests.rlcore.loop.conftest import SHAPE
from tests.rlcore.training.test_sft import config, echo_sequences, whole

QUESTION = (Message(role="user", content="3+4"),)
LONGER = (*QUESTION, Message(role="assistant", content="7"), Message(role="user", content="+2"))
ROWS = [(QUESTION, "seven"), (LONGER, "nine"), ((Message(role="user", content="1+1"),), "two")]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    folder: Path = tmp_path_factory.mktemp("data") / "model"
    import_model(ModelConfig(source="scratch", shape=SHAPE), folder, seed=0)
    return ChatTokenizer.load(folder)


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
    "rotated": (
        lambda them: [
            dataclasses.replace(
                one, sequence=dataclasses.replace(them[n - 1].sequence), loss_mask=them[n - 1].loss_mask
            )
            for n, one in enumerate(them)
        ],
        "its row says 'seven'",
    ),
    "fewer": (lambda them: them[1:], "2 demonstrations were made of 3 rows"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_demonstration_that_is_not_its_row_is_named(name: str, tokenizer: ChatTokenizer) -> None:
    change, says = CHANGES[name]
    with pytest.raises(DataError, match=says):
        require_demonstrations(ROWS, change(made(tokenizer)), tokenizer)


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
    found = pairing_of(model, turn(held_out), tokens_per_microbatch=256, seed=0)
    assert found.num_rows >= 16
    if turn is rotated:
        with pytest.raises(DataError, match="no likelier after their own prompts"):
            require_pairing(found, sigmas=3.0, num_seen=512)
    else:
        require_pairing(found, sigmas=3.0, num_seen=512)


def test_nothing_is_asked_of_few_rows_of_little_training_or_where_a_preset_says_so() -> None:
    none = Pairing(gap=0.0, error=0.1, num_rows=100)
    require_pairing(none, sigmas=3.0, num_seen=511)
    require_pairing(none, sigmas=0.0, num_seen=10_000)
    require_pairing(dataclasses.replace(none, num_rows=15), sigmas=3.0, num_seen=10_000)


def test_label_noise_is_the_share_of_sure_judgements_against_the_label() -> None:
    # Judges are sure at 0.9 on average: 6 pairs count for their label, 2 against it, and one for neither.
    margins = [2.2] * 3 + [2.1973] * 3 + [-2.3] * 2 + [0.1]
    noise = label_noise([2.2] * 6 + [-2.3] * 2)
    assert noise.share == pytest.approx(0.25)
    assert label_noise(margins).num_pairs == 9
    require_labels(noise, 0.25)
    with pytest.raises(DataError, match="25% of the labels look wrong"):
        require_labels(label_noise(([2.2] * 6 + [-2.3] * 2) * 50), 0.2)


def test_a_reward_that_is_not_read_at_the_last_token_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ScalarModel.with_random_head(strategies.tiny_llama(), torch.Generator().manual_seed(1))
    sequences = strategies.random_sequences(2, max_tokens=5)
    require_last_token(model, score_rewards(model, sequences, tokens_per_microbatch=64), sequences)
    scores = ScalarModel._scalars
    monkeypatch.setattr(ScalarModel, "_scalars", lambda self, batch, at: scores(self, batch, (at - 1).clamp(min=0)))
    early = score_rewards(model, sequences, tokens_per_microbatch=64)
    monkeypatch.undo()
    with pytest.raises(TrainingError, match="read at its last token it is"):
        require_last_token(model, early, sequences)
