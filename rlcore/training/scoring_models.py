"""The models that look at completions before the update: the policy as it was, its reference, its critic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from transformers import PreTrainedModel

from rlcore.distributed.sharded import ranks_of
from rlcore.models.batching import share_for
from rlcore.models.heads import ScalarHeadModel, score_rewards, score_shared, score_values
from rlcore.models.policy import score_sequences
from rlcore.text.packing import TokenSequence

if TYPE_CHECKING:
    from jaxtyping import Float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ForwardScores:
    """What the models say of S completions before the update: a float32 [T] tensor of each model and completion.

    Zeros where a model was not asked. ``next_values``: float32 [S], the critic's value beyond the end, 0 where the
    completion ended by itself.
    """

    old: Sequence[Float[torch.Tensor, "_time"]]
    ref: Sequence[Float[torch.Tensor, "_time"]]
    values: Sequence[Float[torch.Tensor, "_time"]]
    next_values: Float[torch.Tensor, "sequences"]


class ScoresCompletions(Protocol):
    """Whoever has the models that look at a completion before the update."""

    @property
    def has_reference(self) -> bool:
        """Whether there is a model that a KL penalty is measured to."""
        ...

    def passes(self, sequences: Sequence[TokenSequence], *, needs_policy: bool, cut: Sequence[int]) -> ForwardScores:
        """What reference and critic say of ``sequences``, and with ``needs_policy`` the policy.

        ``cut``: the numbers of those that were ended by the limit of their length.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ScoringModels:
    """The models of this process as :class:`ScoresCompletions`. ``reference`` and ``critic`` are None when not needed.

    ``bootstrap_truncated``: whether the critic's value stands beyond the end of a completion that was cut by length.
    """

    policy: PreTrainedModel
    reference: PreTrainedModel | None
    critic: ScalarHeadModel | None
    temperature: float
    tokens_per_microbatch: int
    bootstrap_truncated: bool = False

    @property
    def has_reference(self) -> bool:
        """Whether there is a model that a KL penalty is measured to."""
        return self.reference is not None

    def passes(self, sequences: Sequence[TokenSequence], *, needs_policy: bool, cut: Sequence[int]) -> ForwardScores:
        """See :meth:`ScoresCompletions.passes`."""
        mine = share_for(self.policy, sequences, tokens_per_microbatch=self.tokens_per_microbatch)
        place_of = {number: place for place, number in enumerate(mine)}
        own = self._own_passes(
            [sequences[i] for i in mine],
            needs_policy=needs_policy,
            cut=[place_of[i] for i in cut if i in place_of],
        )
        rows = list(zip(own.old, own.ref, own.values, own.next_values, strict=True))
        old, ref, values, next_values = zip(*ranks_of(self.policy).collect(mine, rows), strict=True)
        return ForwardScores(old=old, ref=ref, values=values, next_values=torch.stack(next_values))

    def _own_passes(
        self, sequences: Sequence[TokenSequence], *, needs_policy: bool, cut: Sequence[int]
    ) -> ForwardScores:
        """Those of this rank's share."""
        old = ref = values = [torch.zeros(len(sequence.completion_ids)) for sequence in sequences]
        budget, temperature = self.tokens_per_microbatch, self.temperature
        shared = self.critic is not None and self.critic.backbone is self.policy
        if needs_policy and self.critic is not None and shared:
            old, values = score_shared(self.critic, sequences, tokens_per_microbatch=budget, temperature=temperature)
        elif needs_policy:
            old = score_sequences(self.policy, sequences, tokens_per_microbatch=budget, temperature=temperature)
        if self.reference is not None:
            ref = score_sequences(self.reference, sequences, tokens_per_microbatch=budget, temperature=temperature)
        next_values = torch.zeros(len(sequences))
        if self.critic is not None:
            if not (needs_policy and shared):
                values = score_values(self.critic, sequences, tokens_per_microbatch=budget)
            if self.bootstrap_truncated and ranks_of(self.policy).any(bool(cut)):
                # The state after a last token is where a score of the whole sequence would be read.
                chosen = [sequences[i] for i in cut]
                next_values[list(cut)] = score_rewards(self.critic, chosen, tokens_per_microbatch=budget)
        return ForwardScores(old=old, ref=ref, values=values, next_values=next_values)
