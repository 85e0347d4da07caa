"""Faults of the supervised stages: demonstrations, pairs, and scores."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.faults import models
from benchmarks.faults.lab import Patches, Play, Verdict, stopped_by
from benchmarks.faults.models import CPU, scratch, start
from rlcore.checks.audit.shuffle_gap import (
    match_rare_words,
    measure_shuffle_gap,
    require_rare_word_matches,
    require_shuffle_gap,
)
from rlcore.checks.audit.supervised_data import (
    label_noise,
    require_demonstrations,
    require_gold_pairs,
    require_labels,
    require_last_token,
)
from rlcore.config import RewardModelConfig, SftConfig
from rlcore.evaluation.intervals import pair_accuracy
from rlcore.models.heads import ScalarHeadModel, score_rewards
from rlcore.models.loading import load_policy
from rlcore.text.demonstrations import Demonstration, render_conversation
from rlcore.text.tokenization import ChatTokenizer
from rlcore.training.preferences import TokenPair
from rlcore.training.reward_fit import Fitted, fit_reward_model
from rlcore.training.reward_learner import RewardLearner, reward_members
from rlcore.training.sft import train_sft
from rlcore.types import Message

Rows = list[tuple[tuple[Message, ...], str]]
Made = list[Demonstration]


def same(them: Any) -> Any:
    """Return the rows unchanged."""
    return them


def stories(count: int) -> Rows:
    """Return questions about three names each, with answers that repeat them."""
    rows: Rows = []
    for number in range(0, 3 * count, 3):
        names = ", ".join(f"name{number + place}" for place in range(3))
        rows.append(((Message(role="user", content=f"who are {names}?"),), f"friends: {names}"))
    return rows


def moved_on(rows: Rows) -> Rows:
    """Move each answer to the seventh next prompt."""
    return [(messages, rows[place - 7][1]) for place, (messages, _) in enumerate(rows)]


def sft(
    *, tokens: Callable[[Made], Made] = same, rows: Callable[[Rows], Rows] = same, given: Callable[[], Rows]
) -> Play:
    """Train on demonstrations as the stage does, with the fault in the rows or their tokens."""

    def play(patch: Patches) -> Verdict:
        tokenizer, model = ChatTokenizer.load(scratch()), load_policy(scratch(), **CPU)
        said = rows(given())
        made = tokens([render_conversation(tokenizer, messages, answer) for messages, answer in said])

        def work() -> None:
            require_demonstrations(said, made, tokenizer)
            require_rare_word_matches(match_rare_words(said), SftConfig.min_rare_word_match)
            train_sft(model, made[::2], made[1::2], models.SFT, seed=0, report=lambda *_: None)
            found = measure_shuffle_gap(model, made[1::2], tokens_per_microbatch=4096, seed=0)
            require_shuffle_gap(found, SftConfig.min_shuffle_gap)

        return stopped_by(work)

    return play


def sums() -> Rows:
    """Return sums with short answers, half of them wrong."""
    return models.rows_of("train")


def without_end(them: Made) -> Made:
    """Drop the last token of each row."""
    return [
        Demonstration(
            sequence=dataclasses.replace(one.sequence, completion_ids=one.sequence.completion_ids[:-1]),
            loss_mask=one.loss_mask[:-1],
        )
        for one in them
    ]


def mask_to_the_left(them: Made) -> Made:
    """Shift the loss mask one token to the left."""
    return [dataclasses.replace(one, loss_mask=(*one.loss_mask[1:], False)) for one in them]


def rotated(them: Made) -> Made:
    """Use tokens of the answer seven rows before."""
    return [
        Demonstration(
            sequence=dataclasses.replace(one.sequence, completion_ids=them[place - 7].sequence.completion_ids),
            loss_mask=them[place - 7].loss_mask,
        )
        for place, one in enumerate(them)
    ]


def pairs(swapped: float, *, first: int = 0) -> list[TokenPair]:
    """Return right answers against wrong ones of the same length, a fraction of them swapped."""
    tokenizer, draws, found = ChatTokenizer.load(start()), random.Random(1), []
    for number in range(first, first + 400):
        question, total = f"{number // 20}+{number % 20}", number // 20 + number % 20
        asked = [Message(role="user", content=question)]
        sides = [f"{question}={total}", f"{total}={question}"]
        if draws.random() < swapped:
            sides.reverse()
        prompt_ids, chosen = tokenizer.render_demonstration(asked, sides[0])
        _, rejected = tokenizer.render_demonstration(asked, sides[1])
        found.append(TokenPair(set_id=str(number), prompt_ids=prompt_ids, chosen_ids=chosen, rejected_ids=rejected))
    return found


def fitted(them: list[TokenPair]) -> Fitted:
    """Fit a reward model and audit its labels."""
    config = RewardModelConfig(num_epochs=1, batch_size=16, learning_rate=1e-3, head_learning_rate=1e-3)
    learner = RewardLearner(reward_members(load_policy(start(), **CPU), config, seed=0), config)
    return fit_reward_model(learner, them, config, seed=0, report=lambda *_: None)


def reward_model(swapped: float, bound: float = RewardModelConfig.max_label_noise) -> Play:
    """Fit a reward model on pairs, a fraction of them swapped, and check its labels as the stage does."""

    def play(patch: Patches) -> Verdict:
        noise = label_noise([each.margin for each in fitted(pairs(swapped)).suspects])
        verdict = stopped_by(lambda: require_labels(noise, bound))
        if verdict.caught == "silent" and "cannot tell" in str(noise):
            return Verdict(caught="warned", steps=0, message=str(noise))
        return verdict

    return play


def anchored(swapped: float) -> Play:
    """Fit a reward model on pairs, a fraction of them swapped, and test it on gold pairs."""

    def play(patch: Patches) -> Verdict:
        known = pairs(0.0, first=400)[:50]
        sides = [side for pair in known for side in pair.sides]
        scores = fitted(pairs(swapped)).score(sides).mean(dim=0)
        return stopped_by(lambda: require_gold_pairs(pair_accuracy(scores[::2] - scores[1::2])))

    return play


def read_early(patch: Patches) -> Verdict:
    """Read scores at the token before the last."""
    model = ScalarHeadModel.with_random_head(load_policy(start(), **CPU), torch.Generator().manual_seed(0))
    scores = ScalarHeadModel._scalars
    patch.set(ScalarHeadModel, "_scalars", lambda self, batch, places: scores(self, batch, (places - 1).clamp(min=0)))
    sequences = [side for pair in pairs(0.0)[:2] for side in pair.sides]
    return stopped_by(
        lambda: require_last_token(model, score_rewards(model, sequences, tokens_per_microbatch=512), sequences)
    )


def whole(them: Made) -> Made:
    """Train on prompts too."""
    return [
        Demonstration(
            sequence=dataclasses.replace(
                one.sequence,
                prompt_ids=one.sequence.prompt_ids[:1],
                completion_ids=one.sequence.prompt_ids[1:] + one.sequence.completion_ids,
            ),
            loss_mask=(True,) * (len(one.sequence.prompt_ids) - 1 + len(one.loss_mask)),
        )
        for one in them
    ]


SUPERVISED: dict[str, Play] = {
    "SFT: the end is not trained on": sft(tokens=without_end, given=sums),
    "SFT: the mask is one to the left": sft(tokens=mask_to_the_left, given=sums),
    "SFT: prompts are trained on too": sft(tokens=whole, given=sums),
    "SFT: answers are moved against prompts, as tokens": sft(tokens=rotated, given=sums),
    "SFT: answers are moved against prompts, in rows of text": sft(rows=moved_on, given=partial(stories, 100)),
    "SFT: answers are moved against prompts, in rows of sums": sft(rows=moved_on, given=sums),
    "reward model: a fifth of the labels is swapped, bound 0.05": reward_model(0.2, 0.05),
    "reward model: half of the labels are swapped": reward_model(0.5),
    "reward model: all labels are swapped": reward_model(1.0),
    "reward model: all labels are swapped, with 50 anchors": anchored(1.0),
    "reward model: the score is read one token early": read_early,
}
SOUND: dict[str, Play] = {
    "SFT of sums": sft(given=sums),
    "SFT of text": sft(given=partial(stories, 100)),
    "reward model": reward_model(0.0, 0.05),
    "reward model, with 50 anchors": anchored(0.0),
}
