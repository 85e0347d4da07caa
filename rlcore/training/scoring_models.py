"""Models that score completions before the update: policy, reference policy, critic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from transformers import PreTrainedModel

from rlcore.hardware.sharded import ranks_of
from rlcore.models.architectures import rank_indices
from rlcore.models.heads import ScalarHeadModel, score_rewards, score_shared, score_values
from rlcore.models.policy import completion_logprobs, score_sequences, score_tokens
from rlcore.text.packing import TokenSequence
from rlcore.types import Rollout

if TYPE_CHECKING:
    from jaxtyping import Float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ForwardScores:
    """Scores of S completions before the update, float32 [T] per completion; zeros for models that did not run.

    Attributes:
        old, ref: Log-probabilities of policy and reference policy.
        next_values: float32 [S], critic's value after the end; 0 if the completion ended by itself.
    """

    old: Sequence[Float[torch.Tensor, "_time"]]
    ref: Sequence[Float[torch.Tensor, "_time"]]
    values: Sequence[Float[torch.Tensor, "_time"]]
    next_values: Float[torch.Tensor, "sequences"]


class ScoresCompletions(Protocol):
    """Protocol of objects that score completions before an update."""

    @property
    def has_reference(self) -> bool:
        """True if there is a reference policy for a KL penalty."""
        ...

    def passes(self, sequences: Sequence[TokenSequence], *, needs_policy: bool, cut: Sequence[int]) -> ForwardScores:
        """Score ``sequences`` with reference policy and critic, and if ``needs_policy`` with the policy.

        ``cut``: indices of truncated completions.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ScoringModels:
    """Models of this process as :class:`ScoresCompletions`; ``reference`` and ``critic`` are optional.

    ``bootstrap_truncated``: use the critic's value after the end of a truncated completion.
    """

    policy: PreTrainedModel
    reference: PreTrainedModel | None
    critic: ScalarHeadModel | None
    temperature: float
    tokens_per_microbatch: int
    bootstrap_truncated: bool = False

    @property
    def has_reference(self) -> bool:
        return self.reference is not None

    def passes(self, sequences: Sequence[TokenSequence], *, needs_policy: bool, cut: Sequence[int]) -> ForwardScores:
        """Score sequences; see :meth:`ScoresCompletions.passes`."""
        mine = rank_indices(self.policy, sequences, tokens_per_microbatch=self.tokens_per_microbatch)
        index_of = {number: index for index, number in enumerate(mine)}
        own = self._own_passes(
            [sequences[i] for i in mine],
            needs_policy=needs_policy,
            cut=[index_of[i] for i in cut if i in index_of],
        )
        rows = list(zip(own.old, own.ref, own.values, own.next_values, strict=True))
        old, ref, values, next_values = zip(*ranks_of(self.policy).collect(mine, rows), strict=True)
        return ForwardScores(old=old, ref=ref, values=values, next_values=torch.stack(next_values))

    def _own_passes(
        self, sequences: Sequence[TokenSequence], *, needs_policy: bool, cut: Sequence[int]
    ) -> ForwardScores:
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
                # The value after the last token is read from the state that also scores whole sequences.
                chosen = [sequences[i] for i in cut]
                next_values[list(cut)] = score_rewards(self.critic, chosen, tokens_per_microbatch=budget)
        return ForwardScores(old=old, ref=ref, values=values, next_values=next_values)


def token_scores(
    model: PreTrainedModel, rollouts: Sequence[Rollout], *, temperature: float, tokens_per_microbatch: int
) -> tuple[Float[torch.Tensor, "tokens"], Float[torch.Tensor, "tokens"]]:
    """Return log-probability and entropy of every token of the completions, concatenated, float32 [T] on the CPU."""
    texts = [TokenSequence(prompt_ids=r.prompt.token_ids, completion_ids=r.completion_ids) for r in rollouts]
    score = partial(completion_logprobs, model, temperature=temperature)
    logprobs, entropies = score_tokens(model, texts, score, tokens_per_microbatch=tokens_per_microbatch, count=2)
    return torch.cat(logprobs), torch.cat(entropies)
