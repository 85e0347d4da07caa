"""Losses of the micro-batches of one optimizer step: policy, critic, or both in one pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlcore.algorithms.kl import PenaltyController, k3
from rlcore.algorithms.objective import Coefficients, LossInputs, policy_loss, value_loss
from rlcore.algorithms.surrogates import clamped_difference, token_ratio
from rlcore.algorithms.table import Algorithm
from rlcore.config import CriticConfig, RlConfig
from rlcore.hardware.sharded import Ranks, device_of, run_forward
from rlcore.models.architectures import pack_for
from rlcore.models.heads import ScalarHeadModel
from rlcore.models.policy import completion_logprobs, completion_loss, completion_states
from rlcore.seeding import shuffled
from rlcore.text.packing import PackedBatch
from rlcore.training.audit.loss_formula import kl_sums
from rlcore.training.minibatches import Columns, num_policy_tokens, token_sequences
from rlcore.training.scoring_models import ScoringModels
from rlcore.training.update_stats import FIRST_TOKENS, StatAccumulator
from rlcore.types import TrainingSample

if TYPE_CHECKING:
    from jaxtyping import Float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepLosses:
    """Common inputs of a step's micro-batches.

    Attributes:
        trains_policy: False in critic warm-up.
        starts_at_one: No step was taken since sampling, so the pass's log-probabilities are the old ones.
    """

    policy: PreTrainedModel
    critic: ScalarHeadModel | None
    algorithm: Algorithm
    config: RlConfig
    coefficients: Coefficients
    trains_policy: bool
    starts_at_one: bool

    def each(self, columns: Columns, totals: StatAccumulator) -> Iterator[tuple[Float[Tensor, ""], str]]:
        """Yield each loss of a micro-batch with its name, counting it in ``totals``.

        A loss is computed after the backward pass of the previous one.
        """
        if self.critic is not None and self.critic.backbone is self.policy:
            shared = partial(self._shared, self.critic, columns, totals)
            yield run_forward(self.policy, shared), "the loss of policy and critic"
            return
        if self.trains_policy:
            yield run_forward(self.policy, partial(self._policy, columns, totals)), "the policy's loss"
        if self.critic is not None:
            own = partial(self._critic, self.critic, columns, totals)
            yield run_forward(self.critic, own), "the critic's loss"

    def has_gradient(self, sample: TrainingSample) -> bool:
        """Return False for a completion without advantage if no other loss term needs its forward pass.

        This is exact: the completion stays in the denominator and adds 0 to the numerator.
        """
        others = self.coefficients
        has_terms = others.kl > 0.0 or others.entropy > 0.0 or others.penalty > 0.0
        return has_terms or self.critic is not None or bool(sample.advantages.any())

    def kl_from_old(self, samples: Sequence[TrainingSample], *, tokens_per_microbatch: int) -> float:
        """Return KL(old || policy), nats per token of all samples, by one more forward pass of the policy."""
        models = ScoringModels(
            policy=self.policy,
            reference=None,
            critic=None,
            temperature=self.config.sampling.temperature,
            tokens_per_microbatch=tokens_per_microbatch,
        )
        now = models.passes(token_sequences(samples), needs_policy=True, cut=()).old
        total = sum(
            float(k3(clamped_difference(sample.old_logprobs, logprobs, sample.loss_mask)).double().sum())
            for sample, logprobs in zip(samples, now, strict=True)
        )
        return total / num_policy_tokens(samples)

    @torch.no_grad()
    def measure(
        self,
        samples: Sequence[TrainingSample],
        before: StatAccumulator,
        ranks: Ranks,
        seed: int,
        tokens_per_microbatch: int,
    ) -> StatAccumulator:
        """Count one micro-batch without training on it, so that all metrics of the policy exist; return the totals."""
        totals = before.rank_fraction(ranks)
        batches = pack_for(self.policy, token_sequences(samples), tokens_per_microbatch=tokens_per_microbatch)
        chosen = batches[shuffled(len(batches), seed, "measured")[0]]
        columns = Columns(samples, [torch.zeros(len(sample.loss_mask)) for sample in samples], chosen)
        batch = chosen.to(device_of(self.policy))
        score = partial(completion_logprobs, self.policy, batch, temperature=self.config.sampling.temperature)
        logprobs, entropy = run_forward(self.policy, score)  # the same batch on every rank
        counted = totals if ranks.rank == 0 else StatAccumulator()
        PolicyTerms(step=self, columns=columns, totals=counted)(slice(0, batch.num_tokens), logprobs, entropy)
        return totals.merged(ranks)

    def _policy(self, columns: Columns, totals: StatAccumulator) -> Tensor:
        batch = columns.batch.to(device_of(self.policy))
        return self._policy_loss(columns, completion_states(self.policy, batch), batch, totals)

    def _critic(self, critic: ScalarHeadModel, columns: Columns, totals: StatAccumulator) -> Tensor:
        predicted = critic.token_values(columns.batch.to(device_of(critic)))
        return critic_loss(columns, predicted, self.config.critic, totals)

    def _shared(self, critic: ScalarHeadModel, columns: Columns, totals: StatAccumulator) -> Tensor:
        """Return both losses from one forward pass; the critic's skips the backbone with ``detach`` or in warm-up."""
        batch = columns.batch.to(device_of(self.policy))
        with torch.set_grad_enabled(self.trains_policy):
            states = completion_states(self.policy, batch)
        spares = self.config.critic.detach or not self.trains_policy
        values = critic.state_values(states.detach() if spares else states)
        loss = self.config.critic.coefficient * critic_loss(columns, values, self.config.critic, totals)
        if self.trains_policy:
            loss = loss + self._policy_loss(columns, states, batch, totals)
        return loss

    def _policy_loss(self, columns: Columns, states: Tensor, batch: PackedBatch, totals: StatAccumulator) -> Tensor:
        return completion_loss(
            self.policy,
            states,
            batch,
            PolicyTerms(step=self, columns=columns, totals=totals),
            temperature=self.config.sampling.temperature,
            entropy_gradient=self.coefficients.entropy > 0.0,
            # no token's loss depends on another token of its sequence
            by_token=self.algorithm.ratio is token_ratio and self.coefficients.mismatch.level == "token",
        )


def coefficients_of(config: RlConfig, *, kl: float, penalty: PenaltyController | None) -> Coefficients:
    """Return the coefficients of the loss terms; ``kl`` is the current coefficient, unused if KL is in the reward."""
    return Coefficients(
        kl=kl if config.kl.apply_to == "loss" else 0.0,
        kl_estimator=config.kl.estimator,
        entropy=config.update.entropy_coefficient,
        mismatch=config.update.rollout_correction,
        penalty=penalty.coefficient if penalty else 0.0,
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PolicyTerms:
    """Policy loss as a :data:`rlcore.models.logprobs.LossOfChunk` that counts its metrics in ``totals``."""

    step: StepLosses
    columns: Columns
    totals: StatAccumulator

    def __call__(
        self, positions: slice, logprobs: Float[Tensor, "tokens"], entropy: Float[Tensor, "tokens"]
    ) -> Float[Tensor, ""]:
        """Return the loss of these tokens, float32 scalar; ``logprobs`` and ``entropy`` are [n] of the batch's N."""

        if not len(logprobs):  # this rank has no work left
            return logprobs.sum()

        def column(name: str) -> Tensor:
            return self.columns.get(name)[positions].to(logprobs.device)

        mask, ref_logprobs = column("loss_mask"), column("ref_logprobs")
        old_logprobs = logprobs.detach() if self.step.starts_at_one else column("old_logprobs")
        output = policy_loss(
            LossInputs(
                policy_logprobs=logprobs,
                entropy=entropy,
                old_logprobs=old_logprobs,
                sampler_logprobs=column("sampler_logprobs"),
                ref_logprobs=ref_logprobs,
                advantages=column("advantages"),
                weights=self.columns.weights[positions].to(logprobs.device),
                loss_mask=mask,
                sequence_index=self.columns.batch.sequence_index[positions].to(logprobs.device),
            ),
            self.step.algorithm,
            self.step.coefficients,
        )
        self.totals.add(output)
        if self.step.starts_at_one:
            self._keep_first_tokens(positions, logprobs.detach(), entropy.detach())
        update = self.step.config.update
        if update.early_stop_kl or update.early_stop_ref_kl:
            # kl/ref of the loss is absent if KL is in the reward, and the reward's kl/ref is of the old policy.
            self.totals.add_ref_kl(
                k3(clamped_difference(logprobs.detach(), ref_logprobs, mask)).sum(),
                kl_sums(logprobs.detach(), old_logprobs, ref_logprobs, mask),
            )
        return output.loss

    def _keep_first_tokens(self, positions: slice, logprobs: Tensor, entropy: Tensor) -> None:
        columns = self.columns  # on the CPU, so that choosing tokens does not synchronize with the GPU
        is_first = columns.get("loss_mask") & (columns.batch.token_index < FIRST_TOKENS)
        own = is_first[positions].nonzero()[:, 0]
        engine = torch.stack([columns.replicas, columns.get("sampler_logprobs")])[:, positions][:, own]
        learner = torch.stack([logprobs, entropy])[:, own.to(logprobs.device)]
        self.totals.add_first_tokens(torch.cat([engine.to(learner), learner]).T)


def critic_loss(
    columns: Columns, predicted: Float[Tensor, "tokens"], config: CriticConfig, totals: StatAccumulator
) -> Float[Tensor, ""]:
    """Return the weighted sum of the value loss over the tokens, a scalar with gradient.

    ``predicted``: float32 [N], values of the batch's tokens.
    """
    device = predicted.device
    # Filled before any arithmetic: the gradient of a square is 0 * NaN where a masked target is NaN.
    masked = ~columns.get("loss_mask").to(device)
    per_token = value_loss(
        predicted.masked_fill(masked, 0.0),
        columns.get("values").to(device).masked_fill(masked, 0.0),
        columns.get("returns").to(device).masked_fill(masked, 0.0),
        clip_range=config.clip_range,
        huber_delta=config.huber_delta,
    )
    loss = (columns.weights.to(device) * per_token).sum()
    totals.add_loss("loss/value", loss)
    return loss
