"""Does each answer stand beside its own prompt? The words are asked before training, the model after it.

A set whose answers were shuffled is, to a model, a set whose answers do not depend on their prompts; such sets are
sound too (one answer to everything). So a model that cannot tell own from other answers proves nothing, and stops no
run unless a preset says how much it has to tell apart. What proves a error is where the right answers stand: beside
other prompts.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from scipy.stats import binom
from transformers import PreTrainedModel

from rlcore.errors import DataError
from rlcore.models.policy import score_sequences
from rlcore.seeding import shuffled
from rlcore.text.demonstrations import Demonstration
from rlcore.text.packing import TokenSequence
from rlcore.types import Message

Rows = Sequence[tuple[Sequence[Message], str]]

_WORD = re.compile(r"\w{3,}")
_SHARED = 3  # rare words; two texts of a thousand share so many by chance once in some thousand sets
_FALSE_ALARMS = 1e-6
_MOST_ROWS, _MOST_LETTERS = 50_000, 2_000
_MOST = 128  # rows that are compared after training
_LEAST_ROWS = 16
_SIGMAS = 4.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RareWordMatches:
    """Prompts and answers that share rare words: how many such pairs there are, and how many are pairs of a row."""

    num_found: int
    num_aligned: int


def match_rare_words(rows: Rows) -> RareWordMatches:
    """Pairs of a prompt and an answer that share three words and more which no other prompt and no other answer has.

    ``rows``: the conversation before the last answer, and that answer. Rows of one prompt count as one.
    """
    numbers: dict[str, int] = {}
    in_prompts, in_answers = dict[str, int | None](), dict[str, int | None]()  # the only place of a word; None: several
    for messages, answer in rows[:_MOST_ROWS]:
        prompt = "\n".join(message.content for message in messages)
        number = numbers.setdefault(prompt, len(numbers))
        for text, places in ((prompt, in_prompts), (answer, in_answers)):
            for word in _words(text):
                places[word] = number if places.get(word, number) == number else None
    pairs = Counter(
        (place, other)
        for word, place in in_prompts.items()
        if place is not None and (other := in_answers.get(word)) is not None
    )
    found = [pair for pair, count in pairs.items() if count >= _SHARED]
    return RareWordMatches(num_found=len(found), num_aligned=sum(one == other for one, other in found))


def require_rare_word_matches(mates: RareWordMatches, least: float) -> None:
    """At least the share ``least`` of the pairs that share rare words are pairs of a row; 0: nothing is asked.

    Where that is so, this refuses a set with a chance of one in a million at most (the binomial law, one-sided). Of
    114 sets (those of reasoning-gym, 200 rows each; docstrings; paragraphs cut in halves) 12 had such pairs when sound,
    and .42 to 1.00 of them were a row's own; none was refused. Shuffled or moved by one row, 0 to .03 were. To refuse
    that takes 49 pairs: 4 of the 12 sets had as many in 200 rows. Sets without such words, as sums are, say nothing.

    Raises:
        DataError: answers stand beside other prompts.
    """
    if least and binom.cdf(mates.num_aligned, mates.num_found, least) <= _FALSE_ALARMS:
        raise DataError(
            f"{mates.num_found} answers repeat rare words of one prompt alone, and {mates.num_aligned} of them stand "
            "beside it: answers were moved against their prompts",
            where="the demonstrations",
            fix="look whether each answer is beside its own prompt; if it is, set min_rare_word_match = 0",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ShuffleGap:
    """How much more an answer costs after another prompt than after its own, nats per token, with its error."""

    gap: float
    error: float
    num_rows: int

    @property
    def is_told(self) -> bool:
        """Whether the model tells own answers from others', beyond chance."""
        return self.num_rows >= _LEAST_ROWS and self.gap > _SIGMAS * self.error

    def __str__(self) -> str:
        half = 1.96 * self.error
        text = f"shuffle_gap={self.gap:.3f} nats/token ci95=[{self.gap - half:.3f},{self.gap + half:.3f}]"
        return text if self.is_told else f"{text}; too small to show that prompts and answers match"


def measure_shuffle_gap(
    model: PreTrainedModel, demonstrations: Sequence[Demonstration], *, tokens_per_microbatch: int, seed: int
) -> ShuffleGap:
    """What answers of different prompts lose when they change places."""
    different = list({one.sequence.prompt_ids: one for one in demonstrations}.values())
    order = shuffled(len(different), seed, "pairing")[:_MOST]
    chosen = [different[place] for place in order]
    if len({one.sequence.completion_ids for one in chosen}) < 2:
        return ShuffleGap(gap=0.0, error=0.0, num_rows=0)
    prompts = [one.sequence.prompt_ids for one in chosen]
    own = [one.sequence for one in chosen]
    moved = [
        TokenSequence(prompt_ids=prompt, completion_ids=one.completion_ids)
        for prompt, one in zip([*prompts[1:], prompts[0]], own, strict=True)
    ]
    found = [score_sequences(model, each, tokens_per_microbatch=tokens_per_microbatch) for each in (own, moved)]
    gaps = torch.tensor(
        [
            float((here - there)[torch.tensor(one.loss_mask)].mean())
            for here, there, one in zip(*found, chosen, strict=True)
        ],
        dtype=torch.float64,
    )
    return ShuffleGap(gap=float(gaps.mean()), error=float(gaps.std()) / math.sqrt(len(gaps)), num_rows=len(gaps))


def require_shuffle_gap(pairing: ShuffleGap, least: float) -> None:
    """The gap may be ``least`` nats per token: four standard errors above what was found reach it; 0: nothing is asked.

    By the normal law, a model whose gap is ``least`` is refused once in 30,000 runs. A smaller gap is found out with
    certainty in practice where its error is an eighth of ``least``.

    Raises:
        DataError: the model tells own from other answers less than a preset asks for, or there are too few to tell.
    """
    if least and pairing.num_rows < _LEAST_ROWS:
        raise DataError(
            f"min_shuffle_gap = {least:g} compares held-out answers of different prompts: {_LEAST_ROWS} at least, and "
            f"not "
            "all the same",
            where=f"{pairing.num_rows} held-out demonstrations",
            fix="hold out more demonstrations (num_eval), or leave min_shuffle_gap out",
        )
    most = pairing.gap + _SIGMAS * pairing.error
    if least and not most >= least:
        raise DataError(
            f"{pairing}; the preset asks for {least:g}, and chance explains {most:.3f}",
            where=f"{pairing.num_rows} held-out demonstrations",
            fix="look whether each answer is beside its own prompt; if it is, train longer, or lower min_shuffle_gap",
        )


def _words(text: str) -> Iterator[str]:
    return iter(set(_WORD.findall(text[:_MOST_LETTERS].casefold())))
