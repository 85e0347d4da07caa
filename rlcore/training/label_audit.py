"""Label audit: find suspect labels by heads trained on other pairs, on states of a backbone that saw no label.

A scalar head on frozen states is fitted exactly, because Bradley-Terry with a linear map is convex:

    margin_i = w · x_i,   x_i = state of the chosen side - state of the rejected side
    w = argmin Σ weight_i · loss_i + l2/2 · |s ⊙ w|²,   s_j = the standard deviation of feature j over the pairs

Solved by Newton's method (Boyd & Vandenberghe 2004, section 9.5). The only hyperparameter is ``l2``, which
:func:`choose_l2` cross-validates. There is no intercept: swapping the sides of a pair must flip its sign.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlcore.algorithms.preference import bradley_terry
from rlcore.errors import DataError, TrainingError
from rlcore.hardware.out_of_memory import oom_retry
from rlcore.hardware.sharded import device_of, run_forward
from rlcore.models.architectures import pack_for
from rlcore.models.policy import hidden_states, state_scores
from rlcore.seeding import shuffled
from rlcore.text.packing import PackedBatch, TokenSequence
from rlcore.training.preferences import TokenPair

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Float64, Int


L2_GRID = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
_MAX_STEPS = 50
_TOLERANCE = 1e-8  # squared Newton decrement: twice the remaining loss decrease


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LinearPairs:
    """P pairs as numbers, float64 on the CPU.

    Attributes:
        differences: [P, F].
        margins: [P], as in the loss, like ``probabilities`` and ``weights``.
        prompts: [P], equal for pairs of one prompt, which are never split between folds.
    """

    differences: Float64[Tensor, "pairs features"]
    margins: Float64[Tensor, "pairs"]
    probabilities: Float64[Tensor, "pairs"]
    weights: Float64[Tensor, "pairs"]
    prompts: Int[Tensor, "pairs"]

    def take(self, indices: Int[Tensor, "chosen"] | Bool[Tensor, "pairs"]) -> LinearPairs:
        """Return a subset of the pairs, by int64 indices or boolean mask."""
        return LinearPairs(**{name: getattr(self, name)[indices] for name in self.__slots__})

    def loss(self, margins: Float64[Tensor, "pairs"]) -> Float64[Tensor, ""]:
        """Return the mean Bradley-Terry loss at the given margins [P], in nats per pair."""
        return bradley_terry(
            margins,
            torch.zeros_like(margins),
            margins=self.margins,
            probabilities=self.probabilities,
            weights=self.weights / self.weights.sum(),
        )


def fit_head(pairs: LinearPairs, *, l2: float) -> Float64[Tensor, "features"]:
    """Return the optimal weights w, float64 [F].

    Raises:
        TrainingError: Newton's method did not converge.
    """
    spread = _spread(pairs.differences)
    inputs = pairs.differences / spread
    scaled = LinearPairs(**{name: getattr(pairs, name) for name in LinearPairs.__slots__} | {"differences": inputs})
    weights = torch.zeros(inputs.shape[1], dtype=torch.float64)
    for _ in range(_MAX_STEPS):
        gradient, curvature = _derivatives(scaled, inputs @ weights)
        descent = inputs.T @ gradient + l2 * weights
        hessian = (inputs.T * curvature) @ inputs + l2 * torch.eye(len(weights), dtype=torch.float64)
        step = torch.linalg.solve(hessian, descent)
        decrement = float(descent @ step)
        if decrement < _TOLERANCE:
            return weights / spread
        weights = weights - _step_size(scaled, weights, step, l2=l2, decrement=decrement) * step
    raise TrainingError(
        f"the reward head did not converge in {_MAX_STEPS} steps of Newton's method",
        where="reward_model",
        fix="check for non-finite states or huge margins in the preferences",
    )


def _spread(differences: Tensor) -> Tensor:
    spread = differences.std(dim=0, unbiased=False)
    return torch.where(spread > 0.0, spread, torch.ones_like(spread))


def _derivatives(pairs: LinearPairs, scores: Tensor) -> tuple[Tensor, Tensor]:
    fraction = pairs.weights / pairs.weights.sum()
    right, swapped = torch.sigmoid(scores - pairs.margins), torch.sigmoid(scores + pairs.margins)
    p = pairs.probabilities
    gradient = fraction * ((1.0 - p) * swapped - p * (1.0 - right))
    return gradient, fraction * (p * right * (1.0 - right) + (1.0 - p) * swapped * (1.0 - swapped))


def _step_size(pairs: LinearPairs, weights: Tensor, step: Tensor, *, l2: float, decrement: float) -> float:
    """Return the largest of 1, ½, ¼, … that gains a tenth of the predicted decrease (Armijo backtracking)."""

    def objective(at: Tensor) -> float:
        return float(pairs.loss(pairs.differences @ at)) + 0.5 * l2 * float(at @ at)

    start, size = objective(weights), 1.0
    while size > 1e-6 and objective(weights - size * step) > start - 0.1 * size * decrement:
        size *= 0.5
    return size


def folds_of(prompts: Int[Tensor, "pairs"], num_folds: int, *, seed: int) -> Int[Tensor, "pairs"]:
    """Assign a fold 0..num_folds-1 to each pair, int64 [P]; pairs of a prompt share a fold.

    Raises:
        DataError: Fewer prompts than folds.
    """
    different, index = torch.unique(prompts, return_inverse=True)
    if len(different) < num_folds:
        raise DataError(
            f"{len(different)} prompts cannot be divided into {num_folds} folds",
            where="reward_model.audit_folds",
            fix="add preferences, or set audit_folds = 0",
        )
    order = torch.tensor(shuffled(len(different), seed, "folds"))
    return (order.argsort() % num_folds)[index]


def cross_fitted_margins(pairs: LinearPairs, folds: Int[Tensor, "pairs"], *, l2: float) -> Float64[Tensor, "pairs"]:
    """Return the margin of each pair under a head fitted without its fold, float64 [P]."""
    margins = torch.empty(len(folds), dtype=torch.float64)
    for fold in range(int(folds.max()) + 1):
        held_out = folds == fold
        margins[held_out] = pairs.differences[held_out] @ fit_head(pairs.take(~held_out), l2=l2)
    return margins


def choose_l2(pairs: LinearPairs, folds: Int[Tensor, "pairs"], grid: Sequence[float] = L2_GRID) -> float:
    """Return the L2 strength with the smallest cross-validated loss."""

    def loss(l2: float) -> float:
        return float(pairs.loss(cross_fitted_margins(pairs, folds, l2=l2)))

    return min(grid, key=loss)


@dataclass(frozen=True, kw_only=True, slots=True)
class SuspectLabel:
    """Pair with a suspect label: its row in the file and its cross-fitted margin (log-odds of the label)."""

    row: int
    margin: float


@oom_retry
@torch.no_grad()
def audit_features(
    model: PreTrainedModel, sequences: Sequence[TokenSequence], *, tokens_per_microbatch: int
) -> Float64[Tensor, "sequences features"]:
    """Return features of completions for :func:`audit_labels`: float64 [S, H + 3] on the CPU.

    These are the last token's state, the mean and minimum log-probability of the tokens (an error is often one
    improbable token), and ln of the length.
    """
    features = torch.empty(len(sequences), model.config.hidden_size + 3, dtype=torch.float64)
    for batch in pack_for(model, sequences, tokens_per_microbatch=tokens_per_microbatch):
        batch = batch.to(device_of(model))
        last, logprobs = run_forward(model, partial(_states_and_scores, model, batch))
        for index, number in enumerate(batch.sequences.tolist()):
            own = logprobs[batch.sequence_index == number].double().cpu()
            summary = torch.stack([own.mean(), own.min(), torch.tensor(float(len(own))).double().log()])
            features[number] = torch.cat([last[index].double().cpu(), summary])
    return features


def _states_and_scores(model: PreTrainedModel, batch: PackedBatch) -> tuple[Tensor, Tensor]:
    states = hidden_states(model, batch).flatten(0, 1)
    return states[batch.last_positions], state_scores(model, states[batch.predictors], batch)


def linear_pairs(
    pairs: Sequence[TokenPair], features: Mapping[TokenSequence, Float[Tensor, "features"]]
) -> LinearPairs:
    """Return pairs as differences of their completions' features; pairs of a ranked list share its weight."""
    sides = [tuple(features[side] for side in pair.sides) for pair in pairs]
    sizes: dict[str, int] = {}
    prompts: dict[tuple[int, ...], int] = {}
    for pair in pairs:
        sizes[pair.set_id] = sizes.get(pair.set_id, 0) + 1
        prompts.setdefault(pair.prompt_ids, len(prompts))
    columns = {
        "margins": [pair.margin for pair in pairs],
        "probabilities": [pair.probability for pair in pairs],
        "weights": [pair.weight / sizes[pair.set_id] for pair in pairs],
    }
    return LinearPairs(
        differences=torch.stack([chosen - rejected for chosen, rejected in sides]).double(),
        prompts=torch.tensor([prompts[pair.prompt_ids] for pair in pairs]),
        **{name: torch.tensor(values, dtype=torch.float64) for name, values in columns.items()},
    )


def audit_labels(pairs: LinearPairs, *, num_folds: int, seed: int) -> list[SuspectLabel]:
    """Return all pairs, most suspect first, by K-fold margins with folds by prompt and cross-validated L2 strength.

    Raises:
        DataError: Fewer prompts than folds.
    """
    folds = folds_of(pairs.prompts, num_folds, seed=seed)
    margins = cross_fitted_margins(pairs, folds, l2=choose_l2(pairs, folds)).tolist()
    return sorted(
        (SuspectLabel(row=row, margin=margin) for row, margin in enumerate(margins)), key=lambda one: one.margin
    )
