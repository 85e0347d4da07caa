"""Fitting of a reward model to preferences: its members, and the scale of their rewards on a reference set."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from rlcore.algorithms.preference import smoothed
from rlcore.config import PreferenceLossConfig, RewardModelConfig
from rlcore.errors import DataError
from rlcore.models.reward_ensemble import RewardScale, fit_length_slope, lengths_of, measure_scale
from rlcore.progress import advance
from rlcore.seeding import derive_seed, generator, shuffled
from rlcore.text.packing import TokenSequence
from rlcore.training.label_audit import (
    LinearPairs,
    SuspectLabel,
    audit_labels,
    choose_l2,
    fit_head,
    folds_of,
    linear_pairs,
)
from rlcore.training.optim import Report
from rlcore.training.preferences import TokenPair, different_sequences, preference_sets, shuffled_sets
from rlcore.training.reward_learner import RewardLearner

REFERENCE_PAIRS = 512
"""Maximum number of training pairs that center the rewards; their mean is then known to 1/30 of its spread."""
_HEAD_FOLDS = 5


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Fitted:
    """Result of fitting a reward model.

    Attributes:
        score: Raw scores float32 [M, S] of S training completions; a frozen backbone does not recompute states.
        suspects: Training pairs, most suspect first.
    """

    score: Callable[[Sequence[TokenSequence]], torch.Tensor]
    suspects: tuple[SuspectLabel, ...]


def fit_reward_model(
    learner: RewardLearner, pairs: Sequence[TokenPair], config: RewardModelConfig, *, seed: int, report: Report
) -> Fitted:
    """Audit the labels with the untrained backbone, then train ``config.ensemble`` members.

    Raises:
        DataError: No pairs, or fewer prompts than folds.
        NonFiniteError: NaN or infinity in a loss or gradient.
    """
    if not pairs:
        raise DataError("there are no preference pairs to train on", where="preferences", fix="raise num_train")
    if config.backbone.trainable_layers == 0:
        return _fit_heads(learner, pairs, config, seed=seed, report=report)
    suspects: list[SuspectLabel] = []
    if config.audit_folds:
        sequences = different_sequences(pairs)
        known = dict(zip(sequences, learner.features(sequences), strict=True))
        suspects = audit_labels(linear_pairs(pairs, known), num_folds=config.audit_folds, seed=seed)
    for number in range(config.ensemble):
        own_seed, own_pairs = seed, list(pairs)
        if config.ensemble > 1:
            own_seed = derive_seed(seed, "member", number)
            own_pairs = resample(pairs, seed=own_seed)
        batches = shuffled_sets(
            preference_sets(own_pairs),
            num_epochs=config.num_epochs,
            batch_size=config.batch_size,
            seed=own_seed,
            name="reward_model",
        )
        learner.begin(number, num_steps=len(batches))
        for step, sets in enumerate(batches, start=1):
            report(step, learner.step(sets))
            advance("steps", number * len(batches) + step, config.ensemble * len(batches))
    return Fitted(score=learner.scores, suspects=tuple(suspects))


def resample(pairs: Sequence[TokenPair], *, seed: int) -> list[TokenPair]:
    """Draw as many prompts as there are, with replacement, each with its pairs; repeated prompts count repeatedly."""
    by_prompt: dict[tuple[int, ...], list[TokenPair]] = {}
    for pair in pairs:
        by_prompt.setdefault(pair.prompt_ids, []).append(pair)
    groups = list(by_prompt.values())
    draws = torch.randint(len(groups), (len(groups),), generator=generator(seed, "resample")).tolist()
    return [
        dataclasses.replace(pair, set_id=f"{pair.set_id}#{number}")
        for number, draw in enumerate(draws)
        for pair in groups[draw]
    ]


def _fit_heads(
    learner: RewardLearner, pairs: Sequence[TokenPair], config: RewardModelConfig, *, seed: int, report: Report
) -> Fitted:
    sequences = different_sequences(pairs)
    states = learner.states(sequences)
    known = dict(zip(sequences, states.double(), strict=True))
    everything = _linear(pairs, known, config.loss)
    l2 = choose_l2(everything, folds_of(everything.prompts, _HEAD_FOLDS, seed=seed))
    rows: list[torch.Tensor] = []
    for number in range(config.ensemble):
        own = everything
        if config.ensemble > 1:
            own = _linear(resample(pairs, seed=derive_seed(seed, "member", number)), known, config.loss)
        rows.append(fit_head(own, l2=l2).float().cpu())
        margins = own.differences @ rows[-1].double()
        report(number + 1, {"rm/loss": float(own.loss(margins)), "rm/accuracy": float((margins > 0).double().mean())})
    heads = torch.stack(rows)
    learner.set_heads(heads)
    suspects = audit_labels(everything, num_folds=config.audit_folds, seed=seed) if config.audit_folds else []
    index = {sequence: number for number, sequence in enumerate(sequences)}
    return Fitted(
        score=lambda wanted: (states[[index[sequence] for sequence in wanted]] @ heads.T).T,
        suspects=tuple(suspects),
    )


def _linear(
    pairs: Sequence[TokenPair], states: Mapping[TokenSequence, torch.Tensor], loss: PreferenceLossConfig
) -> LinearPairs:
    given = linear_pairs(pairs, states)
    return dataclasses.replace(
        given,
        margins=given.margins + loss.margin,
        probabilities=smoothed(given.probabilities, loss.label_smoothing),
    )


def measure_scales(
    fitted: Fitted, pairs: Sequence[TokenPair], *, length_debias: bool, seed: int
) -> tuple[RewardScale, ...]:
    """Return each member's scale over the completions of at most 512 training pairs.

    Raises:
        DataError: ``length_debias`` is True, but length bias cannot be measured.
    """
    chosen = [pairs[index] for index in shuffled(len(pairs), seed, "reference")[:REFERENCE_PAIRS]]
    sequences = different_sequences(chosen)
    index = {sequence: number for number, sequence in enumerate(sequences)}
    lengths = lengths_of([sequence.completion_ids for sequence in sequences])
    scores = fitted.score(sequences)
    better, worse = ([index[pair.sides[side]] for pair in chosen] for side in (0, 1))
    log_ratios = (lengths[better] / lengths[worse]).log()

    def scale(own: torch.Tensor) -> RewardScale:
        slope = fit_length_slope(own[better] - own[worse], log_ratios) if length_debias else 0.0
        return measure_scale(own, lengths, length_slope=slope)

    return tuple(scale(own) for own in scores)
