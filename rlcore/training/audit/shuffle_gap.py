"""Audit of pairs: detect answers that were shuffled against their prompts, by rare words and by the trained model.

Answers of some valid datasets do not depend on the prompt. A model that cannot tell own from other answers is therefore
no error, unless the preset requires a gap. The error that stops a stage is evidence that answers match other prompts.
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
_SHARED = 3  # rare words; by chance two texts of a thousand share this number once in some thousand sets
_FALSE_ALARMS = 1e-6
_MAX_ROWS, _MAX_CHARS = 50_000, 2_000
_MAX_COMPARED = 128  # rows compared after training
_MIN_ROWS = 16
_SIGMAS = 4.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RareWordMatches:
    """Number of prompt-answer pairs that share rare words, and the number of those that are in one row."""

    num_found: int
    num_aligned: int


def match_rare_words(rows: Rows) -> RareWordMatches:
    """Count pairs of a prompt and an answer that share at least three words found in no other prompt or answer.

    ``rows``: the conversation before the last answer, and that answer. Rows with the same prompt count as one.
    """
    numbers: dict[str, int] = {}
    in_prompts, in_answers = dict[str, int | None](), dict[str, int | None]()  # the only row of a word; None: several
    for messages, answer in rows[:_MAX_ROWS]:
        prompt = "\n".join(message.content for message in messages)
        number = numbers.setdefault(prompt, len(numbers))
        for text, owners in ((prompt, in_prompts), (answer, in_answers)):
            for word in _words(text):
                owners[word] = number if owners.get(word, number) == number else None
    pairs = Counter(
        (row, other)
        for word, row in in_prompts.items()
        if row is not None and (other := in_answers.get(word)) is not None
    )
    found = [pair for pair, count in pairs.items() if count >= _SHARED]
    return RareWordMatches(num_found=len(found), num_aligned=sum(one == other for one, other in found))


def require_rare_word_matches(matches: RareWordMatches, minimum: float) -> None:
    """Check that at least the fraction ``minimum`` of matches is within one row; 0 disables the check.

    A set at the minimum is rejected with probability at most 1e-6 (one-sided binomial test). Of 114 sets 12 had
    matches, with fractions of 0.42 to 1.00 within one row; none was rejected. After shuffling or a shift by one row the
    fractions were 0 to 0.03. Sets without rare words, such as sums, always pass.

    Raises:
        DataError: Answers match other prompts.
    """
    if minimum and binom.cdf(matches.num_aligned, matches.num_found, minimum) <= _FALSE_ALARMS:
        raise DataError(
            f"{matches.num_found} answers share rare words with one prompt, but only {matches.num_aligned} with their "
            "own: answers were shuffled against their prompts",
            where="the demonstrations",
            fix="check that each answer belongs to its prompt; if it does, set min_rare_word_match = 0",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ShuffleGap:
    """Increase of the loss of answers after another prompt, nats per token, with its standard error."""

    gap: float
    error: float
    num_rows: int

    @property
    def is_significant(self) -> bool:
        """True if the model tells own prompts from others, beyond chance."""
        return self.num_rows >= _MIN_ROWS and self.gap > _SIGMAS * self.error

    def __str__(self) -> str:
        half = 1.96 * self.error
        text = f"shuffle_gap={self.gap:.3f} nats/token ci95=[{self.gap - half:.3f},{self.gap + half:.3f}]"
        return text if self.is_significant else f"{text}; too small to show that prompts and answers match"


def measure_shuffle_gap(
    model: PreTrainedModel, demonstrations: Sequence[Demonstration], *, tokens_per_microbatch: int, seed: int
) -> ShuffleGap:
    """Measure the increase of the loss of answers when different prompts exchange them."""
    different = list({one.sequence.prompt_ids: one for one in demonstrations}.values())
    order = shuffled(len(different), seed, "pairing")[:_MAX_COMPARED]
    chosen = [different[index] for index in order]
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


def require_shuffle_gap(measured: ShuffleGap, minimum: float) -> None:
    """Check that the gap plus four standard errors reaches ``minimum`` nats per token; 0 disables the check.

    A model whose gap equals ``minimum`` fails once in 30,000 runs (normal law).

    Raises:
        DataError: The gap is smaller than the preset requires, or there are too few demonstrations.
    """
    if minimum and measured.num_rows < _MIN_ROWS:
        raise DataError(
            f"min_shuffle_gap = {minimum:g} needs at least {_MIN_ROWS} held-out demonstrations with different prompts, "
            "and different answers",
            where=f"{measured.num_rows} held-out demonstrations",
            fix="hold out more demonstrations (num_eval), or remove min_shuffle_gap",
        )
    upper = measured.gap + _SIGMAS * measured.error
    if minimum and not upper >= minimum:
        raise DataError(
            f"{measured}; min_shuffle_gap = {minimum:g} is above the upper bound {upper:.3f}",
            where=f"{measured.num_rows} held-out demonstrations",
            fix="check that each answer belongs to its prompt; if it does, train longer, or lower min_shuffle_gap",
        )


def _words(text: str) -> Iterator[str]:
    return iter(set(_WORD.findall(text[:_MAX_CHARS].casefold())))
