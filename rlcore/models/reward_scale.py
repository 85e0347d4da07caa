"""From a reward model's raw score to a reward: free of length where asked, centred, in the unit of its spread."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlcore.errors import DataError, ModelError

if TYPE_CHECKING:
    from jaxtyping import Float

SCALE_FILE = "reward_scale.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardScale:
    """``reward = (score - length_slope · ln(length) - shift) / scale``: mean 0 and std 1 over a reference set.

    ``length`` is the number of completion tokens. ``length_slope`` is 0 unless the preset asks to remove the effect of
    length. One for each member of an ensemble.
    """

    shift: float
    scale: float
    length_slope: float = 0.0

    def debias(
        self, scores: Float[Tensor, "sequences"], lengths: Float[Tensor, "sequences"]
    ) -> Float[Tensor, "sequences"]:
        """Raw scores [N] less the effect of lengths [N] in tokens; raw scores unchanged where the slope is 0."""
        return scores - self.length_slope * lengths.to(scores.dtype).log() if self.length_slope else scores

    def centred(
        self, scores: Float[Tensor, "sequences"], lengths: Float[Tensor, "sequences"]
    ) -> Float[Tensor, "sequences"]:
        """Scores [N] with mean 0 over the reference set, in the model's own log-odds."""
        return self.debias(scores, lengths) - self.shift


def measure_scale(
    scores: Float[Tensor, "sequences"], lengths: Float[Tensor, "sequences"], *, length_slope: float = 0.0
) -> RewardScale:
    """The scale of raw scores [S] of a reference set of completions with lengths [S] in tokens."""
    free = RewardScale(shift=0.0, scale=1.0, length_slope=length_slope).debias(scores, lengths)
    std = float(free.std(unbiased=False))
    return RewardScale(shift=float(free.mean()), scale=std if std > 1e-6 else 1.0, length_slope=length_slope)


def fit_length_slope(margins: Float[Tensor, "pairs"], log_ratios: Float[Tensor, "pairs"]) -> float:
    """By how much a margin r_chosen - r_rejected [P] rises per unit of ln(length chosen / length rejected) [P].

    The slope of the least-squares line ``margin = quality + slope · log_ratio``. The intercept takes up what makes the
    chosen answer better whatever the lengths; without it, a true preference would be blamed on length wherever
    better answers are longer. Without the slope the margins have no correlation with length over these pairs.

    Raises:
        DataError: all pairs have the same ratio of lengths.
    """
    x, y = (one.double() - one.double().mean() for one in (log_ratios, margins))
    if float(x.abs().max()) < 1e-9:
        raise DataError(
            "the effect of length cannot be measured: every chosen answer is as much longer than its rejected one",
            where="reward_model.loss.length_debias",
            fix="set length_debias = false, or give preferences with answers of different lengths",
        )
    return float((x @ y) / (x @ x))


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardScales:
    """The scales of an ensemble's members, and the ``temperature`` that turns mean margins into honest log-odds."""

    members: tuple[RewardScale, ...]
    temperature: float = 1.0

    def save(self, folder: Path) -> None:
        """Write them beside the model's checkpoint."""
        (folder / SCALE_FILE).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> RewardScales:
        """Raises ModelError when there is no such file, or another one."""
        path = folder / SCALE_FILE
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            members = tuple(RewardScale(**member) for member in values["members"])
            return cls(members=members, temperature=float(values["temperature"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelError(
                f"the scale of the reward model cannot be read: {error}",
                where=str(path),
                fix="run the reward_model stage again",
            ) from error


def lengths_of(completions: Sequence[Sequence[int]]) -> Float[Tensor, "sequences"]:
    """Number of tokens of each completion, float32 [N]."""
    return torch.tensor([float(len(one)) for one in completions])
