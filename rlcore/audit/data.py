"""Are the rows that a supervised stage learns from what they should be, and did it learn from them?

Before training: each demonstration trains on the assistant's words and the end of each of its turns, and on no others.
After it: answers are likelier after their own prompts than after others', rewards are read at the last token, and no
more labels look wrong than a bound allows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlcore.audit.second_pass import plain_scores
from rlcore.demonstrations import Demonstration
from rlcore.errors import DataError, TrainingError
from rlcore.models.heads import ScalarModel
from rlcore.models.policy import score_sequences
from rlcore.packing import TokenSequence
from rlcore.seeding import shuffled
from rlcore.tokenization import ChatTokenizer
from rlcore.types import Message

_MOST = 128  # rows that are compared after training
_LEAST_ROWS = 16
_TOKENIZED = 1024  # demonstrations that are tokenized a second time
_LEAST_SEEN = 512  # demonstrations, before which a model need not have learned what belongs together


@dataclass(frozen=True, kw_only=True, slots=True)
class Pairing:
    """How much more an answer costs after another prompt than after its own, nats per token, with its error."""

    gap: float
    error: float
    num_rows: int

    def is_above(self, sigmas: float) -> bool:
        """Whether the gap is so many standard errors above 0; True where there are too few rows to tell."""
        return self.num_rows < _LEAST_ROWS or self.gap > sigmas * self.error


def require_demonstrations(
    rows: Sequence[tuple[Sequence[Message], str]], demonstrations: Sequence[Demonstration], tokenizer: ChatTokenizer
) -> None:
    """Every demonstration trains on exactly the assistant's words of its row, and on the end of each turn.

    ``rows``: the conversation before the last answer, and that answer.

    Raises:
        DataError: names the row, with what should be trained on and what is.
    """
    if len(rows) != len(demonstrations):
        raise DataError(f"{len(demonstrations)} demonstrations were made of {len(rows)} rows", fix=_FIX)
    every = max(1, len(rows) // _TOKENIZED)
    for number, ((messages, answer), made) in enumerate(zip(rows, demonstrations, strict=True), start=1):
        ids, spans, where = made.sequence.completion_ids, _spans(made.loss_mask), f"demonstration {number}"
        if not spans or any(ids[end - 1] not in tokenizer.eos_ids for _, end in spans):
            raise DataError("the end of a turn is not trained on", where=where, fix=_FIX)
        if number % every:
            continue
        prompt_ids, answer_ids = tokenizer.render_demonstration(messages, answer)
        start, end = spans[-1]
        if ids[start:end] != answer_ids or (*made.sequence.prompt_ids, *ids[:start]) != prompt_ids:
            asked, said = (
                tokenizer.decode(list(each))[-60:] for each in ((*made.sequence.prompt_ids,), ids[start:end])
            )
            raise DataError(
                f"a demonstration trains on {said!r} after {asked!r}; its row says {answer[:60]!r}",
                where=where,
                fix=_FIX,
            )


def pairing_of(
    model: PreTrainedModel, demonstrations: Sequence[Demonstration], *, tokens_per_microbatch: int, seed: int
) -> Pairing:
    """What answers of different prompts lose when they change places."""
    different = list({one.sequence.prompt_ids: one for one in demonstrations}.values())
    order = shuffled(len(different), seed, "pairing")[:_MOST]
    chosen = [different[place] for place in order]
    if len({one.sequence.completion_ids for one in chosen}) < 2:
        return Pairing(gap=0.0, error=0.0, num_rows=0)
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
    return Pairing(gap=float(gaps.mean()), error=float(gaps.std()) / math.sqrt(len(gaps)), num_rows=len(gaps))


def require_pairing(pairing: Pairing, *, sigmas: float, num_seen: int) -> None:
    """Answers are likelier after their own prompts, by ``sigmas`` standard errors; 0: nothing is asked.

    ``num_seen``: demonstrations that the model was trained on; after a few it need not tell them apart.

    Raises:
        DataError: the model cannot tell the answers of different prompts apart.
    """
    if sigmas and num_seen >= _LEAST_SEEN and not pairing.is_above(sigmas):
        raise DataError(
            f"answers are no likelier after their own prompts than after others': {pairing.gap:.4f} nats per token "
            f"(standard error {pairing.error:.4f}, {pairing.num_rows} demonstrations)",
            where="the demonstrations",
            fix="look whether each answer is beside its own prompt; if it is, train longer, or set min_pairing = 0",
        )


def require_last_token(model: ScalarModel, scores: Tensor, sequences: Sequence[TokenSequence]) -> None:
    """Scores [S] of a few completions are read at their last token, as a plain forward pass of each reads them.

    Raises:
        TrainingError: they are read elsewhere.
    """
    for number, sequence in enumerate(sequences):
        expected, found = plain_scores(model, sequence), float(scores[number])
        half = model.backbone.dtype.itemsize < 4
        if abs(found - expected) > (0.1 if half else 1e-3) * (1.0 + abs(expected)):
            raise TrainingError(
                f"the reward of a completion is {found:.6g}; read at its last token it is {expected:.6g}",
                where=f"a completion of {len(sequence.completion_ids)} tokens",
                fix="the reward model's scores are read at another place than they are trained at",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Noise:
    """Labels that look wrong by confident learning: the share of ``num_pairs`` that is estimated to be."""

    share: float
    error: float
    num_pairs: int


def label_noise(margins: Sequence[float]) -> Noise:
    """The share of wrong labels, from the cross-fitted margins (log-odds of each label), in a simple form.

    A pair counts for the label on which its judges are as sure as they are of labels on average; of those that count,
    the share that counts against its own label (Northcutt et al. 2021, "Confident Learning", with two classes that
    are each other's mirror).
    """
    chances = torch.tensor(list(margins), dtype=torch.float64).sigmoid()
    sure = float(chances[chances > 0.5].mean()) if bool((chances > 0.5).any()) else 1.0
    against, for_it = int((1.0 - chances >= sure).sum()), int((chances >= sure).sum())
    counted = max(1, against + for_it)
    share = against / counted
    return Noise(share=share, error=math.sqrt(share * (1.0 - share) / counted), num_pairs=len(chances))


def require_labels(noise: Noise, bound: float) -> None:
    """At most ``bound`` of the labels look wrong, beyond one standard error.

    Raises:
        DataError: more do.
    """
    if noise.share - noise.error > bound:
        raise DataError(
            f"{noise.share:.0%} of the labels look wrong to judges that never saw them (bound {bound:.0%})",
            where=f"{noise.num_pairs} training pairs",
            fix="read label_audit.parquet from the top; repair the labels, or raise max_label_noise if they are right",
        )


_FIX = "a demonstration has to be tokenized as its row says; nothing has been trained"


def _spans(mask: Sequence[bool]) -> list[tuple[int, int]]:
    edges = [place for place in range(1, len(mask)) if mask[place] != mask[place - 1]]
    runs = list(zip([0, *edges], [*edges, len(mask)], strict=True))
    return [run for run in runs if mask and mask[run[0]]]
