"""Audit of supervised data: tokenization and loss masks before training; reward positions and labels after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from scipy.stats import binom
from torch import Tensor

from rlcore.errors import DataError, TrainingError
from rlcore.evaluation.intervals import Interval, accuracy
from rlcore.hardware.precision import compute_dtype
from rlcore.models.heads import ScalarHeadModel
from rlcore.text.demonstrations import Demonstration
from rlcore.text.packing import TokenSequence
from rlcore.text.tokenization import ChatTokenizer
from rlcore.training.audit.passes import plain_scores
from rlcore.types import Message

_FALSE_ALARMS = 1e-3
_TOKENIZED = 1024  # demonstrations that are tokenized again


def require_demonstrations(
    rows: Sequence[tuple[Sequence[Message], str]], demonstrations: Sequence[Demonstration], tokenizer: ChatTokenizer
) -> None:
    """Check that every demonstration trains on exactly the assistant's words of its row, and on the end of each turn.

    ``rows``: the conversation before the last answer, and that answer.

    Raises:
        DataError: Names the row, with the expected and the actual training text.
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
            prompt, trained = (
                tokenizer.decode(list(each))[-60:] for each in ((*made.sequence.prompt_ids,), ids[start:end])
            )
            raise DataError(
                f"a demonstration trains on {trained!r} after {prompt!r}; its row has {answer[:60]!r}",
                where=where,
                fix=_FIX,
            )


def require_last_token(model: ScalarHeadModel, scores: Tensor, sequences: Sequence[TokenSequence]) -> None:
    """Check that scores [S] are read at the last token of each completion, by plain forward passes.

    Raises:
        TrainingError: They are read elsewhere.
    """
    half = compute_dtype(model.backbone).itemsize < 4
    for number, sequence in enumerate(sequences):
        expected, found = plain_scores(model, sequence), float(scores[number])
        if abs(found - expected) > (0.1 if half else 1e-3) * (1.0 + abs(expected)):
            raise TrainingError(
                f"the reward of a completion is {found:.6g}; read at its last token it is {expected:.6g}",
                where=f"a completion of {len(sequence.completion_ids)} tokens",
                fix="the scores must be read at the token at which they are trained",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelNoise:
    """Suspect labels by confident learning.

    Attributes:
        num_sure: Pairs on which the judges are confident.
        num_against: Confident judgements against the label.
    """

    num_pairs: int
    num_sure: int
    num_against: int

    @property
    def fraction(self) -> float:
        """Estimated fraction of wrong labels; 0 without confident judgements."""
        return self.num_against / max(1, self.num_sure)

    def __str__(self) -> str:
        found = accuracy([index < self.num_against for index in range(max(1, self.num_sure))])
        text = f"label_noise={self.fraction:.2f} ci95=[{found.low:.2f},{found.high:.2f}] n={self.num_pairs}"
        return f"{text}; the audit cannot tell a label from its opposite" if found.high >= 0.5 else text


def label_noise(margins: Sequence[float]) -> LabelNoise:
    """Estimate wrong labels from the cross-fitted margins (log-odds of each label).

    A pair counts for the label on which its judges are at least as confident as the average for that label. The result
    is the fraction that counts against its own label (Northcutt et al. 2021, "Confident Learning", with two mirrored
    classes).
    """
    chances = torch.tensor(list(margins), dtype=torch.float64).sigmoid()
    sure = float(chances[chances > 0.5].mean()) if bool((chances > 0.5).any()) else 1.0
    against, for_it = int((1.0 - chances >= sure).sum()), int((chances >= sure).sum())
    return LabelNoise(num_pairs=len(chances), num_sure=against + for_it, num_against=against)


def require_labels(noise: LabelNoise, bound: float) -> None:
    """Check that at most the fraction ``bound`` of labels looks wrong (binomial test, level 1/1000).

    Random judges are confident of wrong labels as often as of right ones, so no bound fits all sets; 1 disables the
    check.

    Raises:
        DataError: More labels look wrong, or no judgement is confident.
    """
    if bound < 1.0 and not noise.num_sure:
        raise DataError(
            f"max_label_noise = {bound:g} cannot be checked: no judge is sure of any label",
            where=f"{noise.num_pairs} training pairs",
            fix="set audit_folds, add pairs, or remove max_label_noise",
        )
    if binom.sf(noise.num_against - 1, noise.num_sure, bound) <= _FALSE_ALARMS:
        raise DataError(
            f"{noise.fraction:.0%} of the labels look wrong to judges that never saw them (limit {bound:.0%})",
            where=f"{noise.num_pairs} training pairs",
            fix="read label_audit.parquet from the top; correct the labels, or raise max_label_noise if they are right",
        )


def require_gold_pairs(found: Interval) -> None:
    """Check that the reward model's accuracy on gold pairs is above one half.

    No other check finds labels that are all swapped, because they agree with each other in both splits.

    Raises:
        DataError: The interval includes or is below one half.
    """
    if found.low > 0.5:
        return
    is_swapped = found.high < 0.5
    raise DataError(
        f"accuracy on gold pairs is {found.mean:.2f} [{found.low:.2f}, {found.high:.2f}]: "
        + ("the reward model prefers the losers" if is_swapped else "the reward model may be guessing"),
        where=f"{found.n} gold pairs",
        fix="check the labels of the training pairs: they look swapped"
        if is_swapped
        else "add gold pairs, train longer, or check that they follow the criteria of the training pairs",
    )


_FIX = "the tokens of a demonstration must match its row; nothing was trained"


def _spans(mask: Sequence[bool]) -> list[tuple[int, int]]:
    edges = [index for index in range(1, len(mask)) if mask[index] != mask[index - 1]]
    runs = list(zip([0, *edges], [*edges, len(mask)], strict=True))
    return [run for run in runs if mask and mask[run[0]]]
