"""Scale of a reward model: raw scores to rewards that are centered, normalized and optionally length-debiased."""

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
    """Reward scale of one member: mean 0 and std 1 over a reference set.

    ``reward = (score - length_slope · ln(length) - shift) / scale``, with the length in completion tokens.
    ``length_slope`` is 0 unless the preset enables length debiasing.
    """

    shift: float
    scale: float
    length_slope: float = 0.0

    def debias(
        self, scores: Float[Tensor, "sequences"], lengths: Float[Tensor, "sequences"]
    ) -> Float[Tensor, "sequences"]:
        """Remove the effect of lengths [N] in tokens from raw scores [N]."""
        return scores - self.length_slope * lengths.to(scores.dtype).log() if self.length_slope else scores

    def centered(
        self, scores: Float[Tensor, "sequences"], lengths: Float[Tensor, "sequences"]
    ) -> Float[Tensor, "sequences"]:
        """Return scores [N] with mean 0 over the reference set, in the model's own log-odds."""
        return self.debias(scores, lengths) - self.shift


def measure_scale(
    scores: Float[Tensor, "sequences"], lengths: Float[Tensor, "sequences"], *, length_slope: float = 0.0
) -> RewardScale:
    """Return the scale of raw scores [S] of a reference set of completions with lengths [S] in tokens."""
    free = RewardScale(shift=0.0, scale=1.0, length_slope=length_slope).debias(scores, lengths)
    std = float(free.std(unbiased=False))
    return RewardScale(shift=float(free.mean()), scale=std if std > 1e-6 else 1.0, length_slope=length_slope)


def fit_length_slope(margins: Float[Tensor, "pairs"], log_ratios: Float[Tensor, "pairs"]) -> float:
    """Return the increase of a margin r_chosen - r_rejected [P] per ln(length chosen / length rejected) [P].

    This is the slope of the least-squares line ``margin = quality + slope · log_ratio``. The intercept absorbs quality
    that is independent of length; without it, a real preference for better and longer answers would count as length
    bias. After debiasing, margins are uncorrelated with length over these pairs.

    Raises:
        DataError: All pairs have the same ratio of lengths.
    """
    x, y = (one.double() - one.double().mean() for one in (log_ratios, margins))
    if float(x.abs().max()) < 1e-9:
        raise DataError(
            "length bias cannot be measured: all pairs have the same ratio of lengths",
            where="reward_model.loss.length_debias",
            fix="set length_debias = false, or add preferences with answers of different lengths",
        )
    return float((x @ y) / (x @ x))


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardScales:
    """Scales of an ensemble's members, and the ``temperature`` that calibrates mean margins to log-odds."""

    members: tuple[RewardScale, ...]
    temperature: float = 1.0

    def save(self, folder: Path) -> None:
        """Write the scales next to the model's checkpoint."""
        (folder / SCALE_FILE).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> RewardScales:
        """Read the scales of a checkpoint.

        Raises:
            ModelError: The file is missing or damaged.
        """
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
    """Return the number of tokens of each completion, float32 [N]."""
    return torch.tensor([float(len(one)) for one in completions])
