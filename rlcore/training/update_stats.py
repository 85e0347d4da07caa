"""Metrics of one update, accumulated over its micro-batches and steps.

Tensors stay float64 on their device until the update is over, because reading a number synchronizes with the GPU.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlcore.algorithms.objective import LossOutput
from rlcore.config import UpdateConfig
from rlcore.hardware.sharded import Ranks

if TYPE_CHECKING:
    from jaxtyping import Float

FIRST_TOKENS = 32
"""Tokens of each completion whose log-probabilities before the first step an update returns."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateStats:
    """Result of one update.

    Attributes:
        moved: True if any policy weight changed.
        skipped: Error of each skipped step.
        arrived: By rank, epoch and minibatch, a digest of the trained samples.
        epoch_kl: By epoch, the sums of :func:`rlcore.training.audit.loss_formula.kl_sums`, if a limit on KL is set.
        first_tokens: Those of the passes before the first step: the engine's number and log-probability, the learner's
            log-probability, and the entropy.
    """

    policy_version: int
    moved: bool
    metrics: Mapping[str, float]
    skipped: tuple[str, ...] = ()
    arrived: tuple[tuple[tuple[str, ...], ...], ...] = ()
    epoch_kl: tuple[tuple[float, ...], ...] = ()
    first_tokens: Float[Tensor, "tokens 4"] = field(default_factory=lambda: torch.empty(0, 4), compare=False)


Number = float | Tensor  # or a float64 scalar on its device


class StatAccumulator:
    """Accumulator of token sums, maxima, losses per step, and numbers per step."""

    def __init__(self) -> None:
        self._sums: dict[str, Number] = {}
        self._maxima: dict[str, Tensor] = {}
        self._losses: dict[str, Number] = {}
        self._steps: dict[str, list[float]] = {}
        self._first_tokens: list[Tensor] = []
        self._num_tokens: Number = 0.0
        self._epoch_ref_kl: Number = 0.0
        self._epoch_start: tuple[dict[str, Number], Number] = ({}, 0.0)
        self._audited_kl: list[list[Number]] = [[0.0, 0.0, 0.0]]  # before the first epoch, then of each

    def rank_fraction(self, ranks: Ranks) -> StatAccumulator:
        """Return a copy for one rank to continue; earlier counts stay with the first rank."""
        if ranks.rank == 0:
            return copy.deepcopy(self)
        own = StatAccumulator()
        own._steps, own._epoch_start = copy.deepcopy(self._steps), copy.deepcopy(self._epoch_start)
        own._audited_kl = [[0.0, 0.0, 0.0] for _ in self._audited_kl]
        return own

    def merged(self, ranks: Ranks) -> StatAccumulator:
        """Return the counts of all ranks, on every rank."""
        if ranks.size == 1:
            return self
        audited = [list(map(float, each)) for each in self._audited_kl]
        own = (self._sums, self._maxima, self._losses, self._num_tokens, self._epoch_ref_kl, self.first_tokens, audited)
        sums, maxima, losses, num_tokens, ref_kl, first_tokens, epochs = zip(*ranks.gather(own), strict=True)
        self._audited_kl = [list(map(sum, zip(*each, strict=True))) for each in zip(*epochs, strict=True)]
        self._first_tokens = list(first_tokens)
        self._sums, self._losses = _summed(sums), _summed(losses)
        self._num_tokens, self._epoch_ref_kl = float(sum(map(float, num_tokens))), float(sum(map(float, ref_kl)))
        names = {name: None for each in maxima for name in each}
        self._maxima = {name: torch.stack([each[name] for each in maxima if name in each]).amax() for name in names}
        return self

    def add(self, output: LossOutput) -> None:
        """Count one micro-batch of the policy."""
        self._num_tokens = self._num_tokens + output.num_tokens.double()
        for name, value in output.sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + value.double()
        for name, value in output.maxima.items():
            known = self._maxima.get(name, torch.zeros_like(value, dtype=torch.float64))
            self._maxima[name] = torch.maximum(known, value.double())
        self.add_loss("loss/policy", output.loss)

    def add_loss(self, name: str, value: Float[Tensor, ""]) -> None:
        """Add the scalar loss of one micro-batch."""
        self._losses[name] = self._losses.get(name, 0.0) + value.detach().double()

    def record(self, name: str, value: float) -> None:
        """Record a number of one optimizer step."""
        self._steps.setdefault(name, []).append(value)

    def add_first_tokens(self, rows: Float[Tensor, "tokens 4"]) -> None:
        """Keep tokens of one micro-batch for :attr:`UpdateStats.first_tokens`."""
        self._first_tokens.append(rows)

    @property
    def first_tokens(self) -> Float[Tensor, "tokens 4"]:
        """Kept tokens, on the CPU."""
        return torch.cat([torch.empty(0, 4), *(rows.float().cpu() for rows in self._first_tokens)])

    def add_ref_kl(self, total: Float[Tensor, ""], audited: Sequence[Float[Tensor, ""]]) -> None:
        """Add the KL to the reference policy of one micro-batch, summed over its tokens, and the audit's own sums."""
        self._epoch_ref_kl = self._epoch_ref_kl + total.double()
        self._audited_kl[-1:] = [[one + other for one, other in zip(self._audited_kl[-1], audited, strict=True)]]

    @property
    def epoch_kl(self) -> tuple[tuple[float, ...], ...]:
        """Sums of the audit for each epoch."""
        return tuple(tuple(map(float, each)) for each in self._audited_kl[1:])

    @property
    def num_tokens(self) -> int:
        """Number of counted tokens; each epoch counts its tokens again."""
        return int(self._num_tokens)

    def begin_epoch(self) -> None:
        """Restart :meth:`epoch_mean` and :meth:`epoch_ref_kl`."""
        self._epoch_ref_kl = 0.0
        self._audited_kl.append([0.0, 0.0, 0.0])
        self._epoch_start = (dict(self._sums), self._num_tokens)

    def epoch_mean(self, name: str) -> float:
        """Return the mean per token in this epoch; 0 without tokens."""
        sums, _ = self._epoch_start
        return (float(self._sums.get(name, 0.0)) - float(sums.get(name, 0.0))) / self._epoch_tokens

    def epoch_ref_kl(self) -> float:
        """Return the mean KL to the reference policy per token in this epoch; 0 without tokens."""
        return float(self._epoch_ref_kl) / self._epoch_tokens

    def exceeded_kl(self, update: UpdateConfig) -> bool:
        """Return True if the epoch's mean KL to the old or reference policy exceeds its limit."""
        from_old = update.early_stop_kl > 0.0 and self.epoch_mean("kl/old") > update.early_stop_kl
        return from_old or (update.early_stop_ref_kl > 0.0 and self.epoch_ref_kl() > update.early_stop_ref_kl)

    def early_stop_metrics(self, update: UpdateConfig, *, num_epochs: int) -> dict[str, float]:
        """Return the metrics of the limits that are set, after ``num_epochs`` epochs."""
        metrics: dict[str, float] = {}
        if update.early_stop_kl > 0.0 or update.early_stop_ref_kl > 0.0:
            metrics["update/epochs"] = float(num_epochs)
        if update.early_stop_ref_kl > 0.0:
            metrics["kl/ref_last_epoch"] = self.epoch_ref_kl()
        return metrics

    @property
    def _epoch_tokens(self) -> int:
        return max(1, self.num_tokens - int(self._epoch_start[1]))

    def means(self) -> dict[str, float]:
        """Return all metrics: means per token or step, maxima, effective sample size as a fraction of tokens."""
        num_steps = max((len(values) for values in self._steps.values()), default=1)
        result = {name: float(total) / max(1, self.num_tokens) for name, total in self._sums.items()}
        weight, squared = result.pop("mismatch/weight", 1.0), result.pop("mismatch/weight_squared", 1.0)
        if self.num_tokens:
            result["mismatch/ess"] = weight**2 / squared
            result["clip/fraction"] = result["clip/low"] + result["clip/high"]
        result |= {name: float(value) for name, value in self._maxima.items()}
        result |= {name: float(total) / num_steps for name, total in self._losses.items()}
        result |= {name: sum(values) / len(values) for name, values in self._steps.items()}
        return result


def after_skips(metrics: dict[str, float], num_skipped: int) -> dict[str, float]:
    """Return the metrics of an update; after skipped steps, add their number and drop non-finite values.

    If no step was taken, the gradient norm is 0.
    """
    if not num_skipped:
        return metrics
    finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
    return {"gradient_norm": 0.0} | finite | {"update/skipped_steps": float(num_skipped)}


def _summed(gathered: Sequence[Mapping[str, Number]]) -> dict[str, Number]:
    names = {name: None for part in gathered for name in part}
    return {name: sum(float(part.get(name, 0.0)) for part in gathered) for name in names}
