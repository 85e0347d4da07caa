"""Training of reward-model members, in one process or on several ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlcore.config import BackboneConfig, RewardModelConfig
from rlcore.hardware.sharded import device_of, full_state_dict, ranks_of, run_forward, shard_like
from rlcore.models.architectures import pack_for, rank_indices
from rlcore.models.heads import ScalarHeadModel
from rlcore.models.loading import save_model
from rlcore.models.lora import AdaptedModel, add_lora
from rlcore.models.reward_ensemble import keep_layers, last_states, raw_scores, save_members, share_frozen
from rlcore.models.runtime import Runtime
from rlcore.seeding import derive_seed, generator
from rlcore.text.packing import TokenSequence
from rlcore.training.audit.supervised_data import require_last_token
from rlcore.training.label_audit import audit_features
from rlcore.training.optim import Stepper
from rlcore.training.preferences import PreferenceSet, comparison_loss, take_step

if TYPE_CHECKING:
    from jaxtyping import Float, Float64


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
