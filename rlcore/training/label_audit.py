"""Label audit: find suspect labels by heads trained on other pairs, on states of a backbone that saw no label."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlcore.hardware.out_of_memory import oom_retry
from rlcore.hardware.sharded import device_of, run_forward
from rlcore.models.architectures import pack_for
from rlcore.models.policy import hidden_states, state_scores
from rlcore.text.packing import PackedBatch, TokenSequence
from rlcore.training.linear_head import LinearPairs, choose_l2, cross_fitted_margins, folds_of
from rlcore.training.preferences import TokenPair

if TYPE_CHECKING:
    from jaxtyping import Float, Float64


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
    """Return the state at the last token of each sequence, and the log-probability of each token."""
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
