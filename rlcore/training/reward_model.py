"""Training of reward models, in one process or on several ranks: members, their fit, and the scale of their rewards."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlcore.algorithms.preference import smoothed
from rlcore.config import BackboneConfig, PreferenceLossConfig, RewardModelConfig
from rlcore.errors import DataError
from rlcore.hardware.sharded import device_of, full_state_dict, ranks_of, run_forward, shard_like
from rlcore.models.architectures import pack_for, rank_indices
from rlcore.models.heads import ScalarHeadModel
from rlcore.models.loading import save_model
from rlcore.models.lora import AdaptedModel, add_lora
from rlcore.models.reward_ensemble import (
    RewardScale,
    fit_length_slope,
    keep_layers,
    last_states,
    lengths_of,
    measure_scale,
    raw_scores,
    save_members,
    share_frozen,
)
from rlcore.models.runtime import Runtime
from rlcore.progress import advance
from rlcore.seeding import derive_seed, generator, shuffled
from rlcore.text.packing import TokenSequence
from rlcore.training.audit.supervised_data import require_last_token
from rlcore.training.label_audit import (
    LinearPairs,
    SuspectLabel,
    audit_features,
    audit_labels,
    choose_l2,
    fit_head,
    folds_of,
    linear_pairs,
)
from rlcore.training.optim import Report, Stepper
from rlcore.training.preferences import (
    PreferenceSet,
    TokenPair,
    comparison_loss,
    different_sequences,
    preference_sets,
    shuffled_sets,
    take_step,
)

if TYPE_CHECKING:
    from jaxtyping import Float, Float64

REFERENCE_PAIRS = 512
"""Maximum number of training pairs that center the rewards; their mean is then known to 1/30 of its spread."""
_HEAD_FOLDS = 5


class RewardLearner:
    """Members of a reward model in this process, which may be one of several ranks."""

    def __init__(self, members: Sequence[ScalarHeadModel], config: RewardModelConfig) -> None:
        self.members, self.ranks = tuple(members), ranks_of(members[0])
        self._config, self._budget = config, config.tokens_per_microbatch

    def features(self, sequences: Sequence[TokenSequence]) -> Float64[Tensor, "sequences features"]:
        """Return audit features of completions before any step: float64 [S, H + 3]."""
        audit = partial(audit_features, self.members[0].backbone, tokens_per_microbatch=self._budget)
        return self._shared(audit, sequences)

    def states(self, sequences: Sequence[TokenSequence]) -> Float[Tensor, "sequences hidden"]:
        """Return the first member's state at the last token of each sequence: float32 [S, H]."""
        state = partial(last_states, self.members[0].backbone, tokens_per_microbatch=self._budget)
        return self._shared(state, sequences)

    @torch.no_grad()
    def set_heads(self, heads: Float[Tensor, "members hidden"]) -> None:
        """Replace the heads on a backbone that all members share."""
        for member, weights in zip(self.members, heads, strict=True):
            weight = member.head.weight
            weight.copy_(shard_like(weight, weights[None].to(weight.device, weight.dtype)))

    def begin(self, member: int, *, num_steps: int) -> None:
        """Prepare ``num_steps`` steps of one member."""
        config, self._model = self._config, self.members[member]
        self._steps = Stepper(
            self._model,
            [(self._model.backbone, config.learning_rate), (self._model.head, config.head_learning_rate)],
            config.optim,
            num_steps=num_steps,
            tokens=self._budget,
            setting="reward_model.tokens_per_microbatch",
        )

    def step(self, sets: Sequence[PreferenceSet]) -> dict[str, float]:
        """Take one step; return its loss, the accuracy before it, the gradient norm and the next learning rate.

        Raises:
            NonFiniteError: NaN or infinity in a loss or gradient; the step was not taken.
        """
        loss_of = partial(_loss, self._model, self._config)
        name = "the reward model's loss"
        loss, (chosen, rejected), metrics = take_step(self._steps, self._model, sets, loss_of, name=name)
        return {"rm/loss": loss, "rm/accuracy": float((chosen > rejected).double().mean()), **metrics}

    def scores(self, sequences: Sequence[TokenSequence]) -> Float[Tensor, "members sequences"]:
        """Return raw scores: float32 [M, S]."""

        def score(mine: Sequence[TokenSequence]) -> Tensor:
            return raw_scores(self.members, mine, tokens_per_microbatch=self._budget).T

        return self._shared(score, sequences).T.contiguous()

    def probe(self, sequences: Sequence[TokenSequence]) -> None:
        """Check on a few completions that scores are read at the last token.

        Raises:
            TrainingError: They are read elsewhere.
        """
        first = self.members[0]
        scores = raw_scores((first,), sequences, tokens_per_microbatch=self._budget)[0]
        run_forward(first, partial(require_last_token, first, scores, sequences))

    def save_model(self, start: Path, folder: Path) -> None:
        """Write backbone and members, with the tokenizer of ``start``, their initial checkpoint."""
        backbone = self.members[0].backbone
        state = full_state_dict(backbone)
        self.ranks.broadcast_object(partial(save_model, backbone, start, folder, state=state))
        save_members(self.members, folder)

    def _shared(self, work: Callable[[Sequence[TokenSequence]], Tensor], sequences: Sequence[TokenSequence]) -> Tensor:
        mine = rank_indices(self.members[0].backbone, sequences, tokens_per_microbatch=self._budget)
        own = work([sequences[i] for i in mine])
        found = own.new_empty((len(sequences), *own.shape[1:]))
        for numbers, rows in self.ranks.gather((mine, own)):
            found[numbers] = rows
        return found


def reward_backbone(
    start: Path, config: BackboneConfig, runtime: Runtime, *, seed: int
) -> PreTrainedModel | AdaptedModel:
    """Load the first layers of a checkpoint, or an adapter on its frozen weights."""
    if config.lora.rank:
        return add_lora(runtime.load_base(start), config.lora, "reward_model", seed=seed)
    backbone = runtime.load_trainable(start)
    keep_layers(backbone, config.layers)
    return backbone


def reward_members(
    backbone: PreTrainedModel | AdaptedModel, config: RewardModelConfig, *, seed: int
) -> tuple[ScalarHeadModel, ...]:
    """Return the untrained members. The first uses ``backbone`` itself; all share frozen weights."""
    first = ScalarHeadModel.with_random_head(backbone, generator(seed, "reward_head"))
    first.train_last_layers(config.backbone.trainable_layers)
    members = (first, *(share_frozen(first) for _ in range(1, config.ensemble)))
    if config.ensemble > 1:
        for number, member in enumerate(members):
            member.init_head(generator(derive_seed(seed, "member", number), "reward_head"))
    return members


def _loss(
    model: ScalarHeadModel, config: RewardModelConfig, tokens: int, group: Sequence[PreferenceSet], weight: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss of a micro-batch twice, and the scores of both sides [2, P]."""
    sequences = [sequence for each in group for sequence in each.sequences]
    batches = pack_for(model.backbone, sequences, tokens_per_microbatch=tokens)
    scores = torch.cat([model.sequence_scores(batch.to(device_of(model))) for batch in batches])
    scores = scores[torch.cat([batch.sequences for batch in batches]).argsort().to(scores.device)]
    loss, sides = comparison_loss(group, scores, weight, config.loss)
    return loss, loss, sides


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
