"""The policy's loss of a micro-batch, part by part: what the head calls with a few sequences' log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from rlcore.algorithms.kl import k3
from rlcore.algorithms.objective import Coefficients, LossInputs, policy_loss
from rlcore.algorithms.ratios import clamped_difference, token_ratio
from rlcore.algorithms.table import Algorithm
from rlcore.config import RlConfig
from rlcore.training.minibatches import Columns
from rlcore.training.totals import Totals

if TYPE_CHECKING:
    from jaxtyping import Float


def coefficients_of(config: RlConfig, *, kl: float) -> Coefficients:
    """What the loss's terms count in a run; ``kl``: the coefficient as it is now, which is 0 here if in the reward."""
    return Coefficients(
        kl=kl if config.kl.placement == "loss" else 0.0,
        kl_estimator=config.kl.estimator,
        entropy=config.update.entropy_coefficient,
        mismatch=config.update.mismatch,
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PolicyTerms:
    """A :data:`rlcore.models.head_loss.LossOfChunk` that counts its metrics in ``totals``.

    ``starts_at_one``: no step was taken since sampling, so the pass's own log-probabilities are the old ones.
    ``tracks_reference``: the KL to the reference is wanted though it is in no loss.
    """

    algorithm: Algorithm
    coefficients: Coefficients
    columns: Columns
    totals: Totals
    starts_at_one: bool
    tracks_reference: bool

    @property
    def by_token(self) -> bool:
        """Whether no token's term looks at another token of its sequence."""
        return self.algorithm.ratio is token_ratio and self.coefficients.mismatch.level == "token"

    def __call__(
        self, places: slice, logprobs: Float[Tensor, "tokens"], entropy: Float[Tensor, "tokens"]
    ) -> Float[Tensor, ""]:
        """The loss of these tokens, float32 scalar; ``logprobs`` and ``entropy`` are [n] of the batch's N tokens."""

        if not len(logprobs):  # a rank that has nothing left to do
            return logprobs.sum()

        def column(name: str) -> Tensor:
            return self.columns.get(name)[places].to(logprobs.device)

        mask, ref_logprobs = column("loss_mask"), column("ref_logprobs")
        output = policy_loss(
            LossInputs(
                policy_logprobs=logprobs,
                entropy=entropy,
                old_logprobs=logprobs.detach() if self.starts_at_one else column("old_logprobs"),
                sampler_logprobs=column("sampler_logprobs"),
                ref_logprobs=ref_logprobs,
                advantages=column("advantages"),
                weights=self.columns.weights[places].to(logprobs.device),
                loss_mask=mask,
                sequence_index=self.columns.batch.sequence_index[places].to(logprobs.device),
            ),
            self.algorithm,
            self.coefficients,
        )
        self.totals.add(output)
        if self.tracks_reference:
            # Not kl/ref of the loss: KL in the reward is in no loss, and that of its rewards is measured before.
            self.totals.add_ref_kl(k3(clamped_difference(logprobs.detach(), ref_logprobs, mask)).sum())
        return output.loss
