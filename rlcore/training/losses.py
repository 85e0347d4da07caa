"""The losses of one optimizer step, a micro-batch at a time: each ready for its backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from rlcore.algorithms.objective import Coefficients
from rlcore.algorithms.table import Algorithm
from rlcore.config import RlConfig
from rlcore.models.heads import ScalarModel
from rlcore.models.policy import completion_loss, completion_states
from rlcore.models.sharded import whole_pass
from rlcore.packing import PackedBatch
from rlcore.training.minibatches import Columns
from rlcore.training.policy_terms import PolicyTerms
from rlcore.training.totals import Totals
from rlcore.training.value_terms import critic_loss

if TYPE_CHECKING:
    from jaxtyping import Float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepLosses:
    """What a step's micro-batches have in common; see :class:`~rlcore.training.policy_terms.PolicyTerms`.

    ``trains_policy``: not while the critic warms up alone.
    """

    policy: PreTrainedModel
    critic: ScalarModel | None
    algorithm: Algorithm
    config: RlConfig
    coefficients: Coefficients
    trains_policy: bool
    starts_at_one: bool

    def each(self, columns: Columns, totals: Totals) -> Iterator[tuple[Float[torch.Tensor, ""], str]]:
        """Each loss of a micro-batch with its name, counted in ``totals``.

        The next is computed when it is asked for, after the backward pass of the one before.
        """
        if self.critic is not None and self.critic.backbone is self.policy:
            shared = partial(self._shared, self.critic, columns, totals)
            yield whole_pass(self.policy, shared), "the loss of policy and critic"
            return
        if self.trains_policy:
            yield whole_pass(self.policy, partial(self._policy, columns, totals)), "the policy's loss"
        if self.critic is not None:
            own = partial(self._critic, self.critic, columns, totals)
            yield whole_pass(self.critic, own), "the critic's loss"

    def terms(self, columns: Columns, totals: Totals) -> PolicyTerms:
        """The policy's loss as its head asks for it."""
        return PolicyTerms(
            algorithm=self.algorithm,
            coefficients=self.coefficients,
            columns=columns,
            totals=totals,
            starts_at_one=self.starts_at_one,
            tracks_reference=self.config.update.max_ref_kl > 0.0,
        )

    def _policy(self, columns: Columns, totals: Totals) -> torch.Tensor:
        batch = columns.batch.to(self.policy.device)
        return self._policy_loss(columns, completion_states(self.policy, batch), batch, totals)

    def _critic(self, critic: ScalarModel, columns: Columns, totals: Totals) -> torch.Tensor:
        predicted = critic.token_values(columns.batch.to(critic.backbone.device))
        return critic_loss(columns, predicted, self.config.critic, totals)

    def _shared(self, critic: ScalarModel, columns: Columns, totals: Totals) -> torch.Tensor:
        """Both losses from one forward pass; with ``detach``, and during warm-up, the critic's spares the trunk."""
        batch = columns.batch.to(self.policy.device)
        with torch.set_grad_enabled(self.trains_policy):
            states = completion_states(self.policy, batch)
        spares = self.config.critic.detach or not self.trains_policy
        values = critic.state_values(states.detach() if spares else states)
        loss = self.config.critic.coefficient * critic_loss(columns, values, self.config.critic, totals)
        if self.trains_policy:
            loss = loss + self._policy_loss(columns, states, batch, totals)
        return loss

    def _policy_loss(self, columns: Columns, states: torch.Tensor, batch: PackedBatch, totals: Totals) -> torch.Tensor:
        terms = self.terms(columns, totals)
        return completion_loss(
            self.policy,
            states,
            batch,
            terms,
            temperature=self.config.sampling.temperature,
            entropy_gradient=terms.coefficients.entropy > 0.0,
            by_token=terms.by_token,
        )
