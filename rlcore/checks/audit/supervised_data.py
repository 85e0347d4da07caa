"""Are the rows that a supervised stage learns from what they should be, and did it learn from them?

Before training: each demonstration trains on the assistant's words and the end of each of its turns, and on no others.
After it: rewards are read at the last token, no more labels look wrong than a bound allows, and pairs whose winners are
known are told. Whether answers stand
beside their own prompts is the question of :mod:`rlcore.checks.audit.shuffle_gap`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from scipy.stats import binom
from torch import Tensor

from rlcore.checks.audit.passes import plain_scores
from rlcore.errors import DataError, TrainingError
from rlcore.evaluation.intervals import Interval, accuracy
from rlcore.hardware.precision import compute_dtype
from rlcore.models.heads import ScalarHeadModel
from rlcore.text.demonstrations import Demonstration
from rlcore.text.packing import TokenSequence
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import Message

_FALSE_ALARMS = 1e-3
_TOKENIZED = 1024  # demonstrations that are tokenized a second time


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


def require_last_token(model: ScalarHeadModel, scores: Tensor, sequences: Sequence[TokenSequence]) -> None:
    """Scores [S] of a few completions are read at their last token, as a plain forward pass of each reads them.

    Raises:
        TrainingError: they are read elsewhere.
    """
    half = compute_dtype(model.backbone).itemsize < 4
    for number, sequence in enumerate(sequences):
        expected, found = plain_scores(model, sequence), float(scores[number])
        if abs(found - expected) > (0.1 if half else 1e-3) * (1.0 + abs(expected)):
            raise TrainingError(
                f"the reward of a completion is {found:.6g}; read at its last token it is {expected:.6g}",
                where=f"a completion of {len(sequence.completion_ids)} tokens",
                fix="the reward model's scores are read at another place than they are trained at",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelNoise:
    """Labels by confident learning: of ``num_pairs``, those that judges are sure about, and are sure against."""

    num_pairs: int
    num_sure: int
    num_against: int

    @property
    def share(self) -> float:
        """The estimated share of wrong labels; 0 where no judge is sure."""
        return self.num_against / max(1, self.num_sure)

    def __str__(self) -> str:
        found = accuracy([place < self.num_against for place in range(max(1, self.num_sure))])
        text = f"label_noise={self.share:.2f} ci95=[{found.low:.2f},{found.high:.2f}] n={self.num_pairs}"
        return f"{text}; the audit cannot tell a label from its opposite" if found.high >= 0.5 else text


def label_noise(margins: Sequence[float]) -> LabelNoise:
    """Labels that look wrong, from the cross-fitted margins (log-odds of each label), in a simple form.

    A pair counts for the label on which its judges are as sure as they are of labels on average; of those that count,
    the share that counts against its own label (Northcutt et al. 2021, "Confident Learning", with two classes that
    are each other's mirror).
    """
    chances = torch.tensor(list(margins), dtype=torch.float64).sigmoid()
    sure = float(chances[chances > 0.5].mean()) if bool((chances > 0.5).any()) else 1.0
    against, for_it = int((1.0 - chances >= sure).sum()), int((chances >= sure).sum())
    return LabelNoise(num_pairs=len(chances), num_sure=against + for_it, num_against=against)


def require_labels(noise: LabelNoise, bound: float) -> None:
    """At most ``bound`` of the labels look wrong, beyond what chance gives once in a thousand sets (binomial law).

    Judges that guess are sure of wrong labels as often as of right ones. So no bound is sound for all sets, and 1 asks
    for nothing.

    Raises:
        DataError: more do, or no judge is sure of any label.
    """
    if bound < 1.0 and not noise.num_sure:
        raise DataError(
            f"max_label_noise = {bound:g} asks how many labels look wrong, and no judge is sure of any",
            where=f"{noise.num_pairs} training pairs",
            fix="set audit_folds, give more pairs, or leave max_label_noise out",
        )
    if binom.sf(noise.num_against - 1, noise.num_sure, bound) <= _FALSE_ALARMS:
        raise DataError(
            f"{noise.share:.0%} of the labels look wrong to judges that never saw them (bound {bound:.0%})",
            where=f"{noise.num_pairs} training pairs",
            fix="read label_audit.parquet from the top; repair the labels, or raise max_label_noise if they are right",
        )


def require_gold_pairs(found: Interval) -> None:
    """A reward model tells pairs whose winners are known better than a coin: the interval lies above one half.

    Labels that are all swapped agree with each other, on both sides of the split; no other check can see them.

    Raises:
        DataError: it does not, or there are too few pairs to show it.
    """
    if found.low > 0.5:
        return
    swapped, share = found.high < 0.5, f"{found.mean:.2f} [{found.low:.2f}, {found.high:.2f}]"
    raise DataError(
        f"the reward model is right on {share} of the pairs whose winners are known"
        + (": it prefers the losers" if swapped else ": it may be guessing"),
        where=f"{found.n} anchors",
        fix="see which side of the training pairs is chosen: their labels look swapped"
        if swapped
        else "give more anchors, train longer, or see whether they ask for what the training pairs teach",
    )


_FIX = "a demonstration has to be tokenized as its row says; nothing has been trained"


def _spans(mask: Sequence[bool]) -> list[tuple[int, int]]:
    edges = [place for place in range(1, len(mask)) if mask[place] != mask[place - 1]]
    runs = list(zip([0, *edges], [*edges, len(mask)], strict=True))
    return [run for run in runs if mask and mask[run[0]]]
