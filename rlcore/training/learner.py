"""The learner: the policy (and the critic) that an iteration's experience updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from rlcore.algorithms.kl import KlController
from rlcore.algorithms.objective import Coefficients, LossInputs, policy_loss
from rlcore.algorithms.table import Algorithm
from rlcore.algorithms.values import value_loss
from rlcore.config import RlConfig
from rlcore.errors import NonFiniteError
from rlcore.models.heads import ScalarModel
from rlcore.models.policy import completion_logprobs
from rlcore.packing import PackedBatch, TokenSequence, pack
from rlcore.seeding import shuffled
from rlcore.training.optim import clip_gradient, make_optimizer, make_scheduler, take_step
from rlcore.training.totals import Totals
from rlcore.types import TrainingSample


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateStats:
    """What one update did. ``moved``: whether any policy weight changed, so the engine must be seen to move too."""

    policy_version: int
    moved: bool
    metrics: Mapping[str, float]


class Learner:
    """Weights, optimizers, schedules, KL coefficient and policy version: everything of training that has state."""

    def __init__(
        self, policy: PreTrainedModel, critic: ScalarModel | None, *, algorithm: Algorithm, config: RlConfig
    ) -> None:
        self.policy, self.critic = policy, critic
        self.algorithm, self.config = algorithm, config
        update = config.update
        num_steps = config.num_iterations * update.epochs * update.minibatches
        self.optimizer = make_optimizer([(policy, config.learning_rate)], update.optim)
        self.scheduler = make_scheduler(self.optimizer, update.optim, num_steps=num_steps)
        if critic is not None:
            self.critic_optimizer = make_optimizer([(critic, config.critic.learning_rate)], update.optim)
            self.critic_scheduler = make_scheduler(self.critic_optimizer, update.optim, num_steps=num_steps)
        self.kl = KlController(coefficient=config.kl.coefficient, target=config.kl.target, horizon=config.kl.horizon)
        self.policy_version = 0

    @property
    def needs_old_logprobs(self) -> bool:
        """One step per batch of rollouts starts at ratio 1: its own detached forward pass is the old policy."""
        return self.config.update.epochs * self.config.update.minibatches > 1

    def update(self, samples: Sequence[TrainingSample], *, seed: int) -> UpdateStats:
        """Train on the samples of one iteration.

        Raises:
            NonFiniteError: NaN or infinity in a sample, a loss or a gradient; the step that met it was not taken.
        """
        _require_finite(samples)
        totals = Totals()
        update = self.config.update
        moved = False
        for epoch in range(update.epochs):
            totals.begin_epoch()
            for minibatch in split_by_prompt(samples, update.minibatches, seed=seed, epoch=epoch):
                moved |= self._step(minibatch, totals)
            if update.max_kl > 0.0 and totals.epoch_mean("kl/old") > update.max_kl:
                break
        self.policy_version += 1
        metrics = totals.means() | {
            "policy_version": float(self.policy_version),
            "learning_rate": float(self.scheduler.get_last_lr()[0]),
            "kl/coefficient": self.kl.coefficient,
        }
        if self.critic is not None:
            metrics["critic/learning_rate"] = float(self.critic_scheduler.get_last_lr()[0])
        return UpdateStats(policy_version=self.policy_version, moved=moved, metrics=metrics)

    def observe_kl(self, mean_kl: float, num_samples: int) -> None:
        """Let the adaptive coefficient see the KL of an iteration (nats per completion)."""
        self.kl = self.kl.updated(mean_kl, num_samples)

    def _step(self, samples: Sequence[TrainingSample], totals: Totals) -> bool:
        """One optimizer step over a minibatch, its gradient accumulated over packed micro-batches.

        Returns whether the policy moved: where its gradient is zero, no step is taken, since momentum alone would move
        it. Both gradients are checked before either model moves.
        """
        weights = _weights(self.algorithm, samples)
        chosen = [i for i, sample in enumerate(samples) if self._has_gradient(sample)]
        sequences = [
            TokenSequence(prompt_ids=samples[i].prompt_ids, completion_ids=samples[i].completion_ids) for i in chosen
        ]
        self._clear_gradients()  # an update that was given up may have left some behind
        for batch in pack(sequences, tokens_per_microbatch=self.config.update.tokens_per_microbatch):
            picked = _Columns([samples[i] for i in chosen], [weights[i] for i in chosen], batch)
            if self._trains_policy:
                self._backward_policy(picked, totals)
            if self.critic is not None:
                self._backward_critic(self.critic, picked, totals)
        max_grad_norm = self.config.update.optim.max_grad_norm
        norm = clip_gradient(self.optimizer, max_grad_norm=max_grad_norm)
        if self.critic is not None:
            totals.record("critic/gradient_norm", clip_gradient(self.critic_optimizer, max_grad_norm=max_grad_norm))
            take_step(self.critic_optimizer, self.critic_scheduler)
        if not self._trains_policy:
            return False
        totals.record("gradient_norm", norm)
        if norm > 0.0:
            take_step(self.optimizer, self.scheduler)
        return norm > 0.0

    @property
    def _trains_policy(self) -> bool:
        return self.critic is None or self.policy_version >= self.config.critic.warmup_iterations

    def _clear_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        if self.critic is not None:
            self.critic_optimizer.zero_grad(set_to_none=True)

    def _has_gradient(self, sample: TrainingSample) -> bool:
        """A completion without advantage is left out before the forward pass where no other term needs it.

        Exact: it stays in the denominator, and adds 0 to the numerator.
        """
        other_terms = self._kl_in_loss > 0.0 or self.config.update.entropy_coefficient > 0.0
        return other_terms or self.critic is not None or bool(sample.advantages.any())

    @property
    def _kl_in_loss(self) -> float:
        return self.kl.coefficient if self.config.kl.placement == "loss" else 0.0

    def _backward_policy(self, columns: _Columns, totals: Totals) -> None:
        coefficients = Coefficients(
            kl=self._kl_in_loss,
            kl_estimator=self.config.kl.estimator,
            entropy=self.config.update.entropy_coefficient,
            mismatch=self.config.update.mismatch,
        )
        batch = columns.batch.to(self.policy.device)
        logprobs, entropy = completion_logprobs(
            self.policy,
            batch,
            temperature=self.config.sampling.temperature,
            entropy_gradient=coefficients.entropy > 0.0,
        )
        device = logprobs.device
        old = columns.get("old_logprobs").to(device) if self.needs_old_logprobs else logprobs.detach()
        output = policy_loss(
            LossInputs(
                policy_logprobs=logprobs,
                entropy=entropy,
                old_logprobs=old,
                sampler_logprobs=columns.get("sampler_logprobs").to(device),
                ref_logprobs=columns.get("ref_logprobs").to(device),
                advantages=columns.get("advantages").to(device),
                weights=columns.weights.to(device),
                loss_mask=columns.get("loss_mask").to(device),
                sequence_index=batch.sequence_index,
            ),
            self.algorithm,
            coefficients,
        )
        _backward(output.loss, "the policy's loss")
        totals.add(output)

    def _backward_critic(self, critic: ScalarModel, columns: _Columns, totals: Totals) -> None:
        predicted = critic.token_values(columns.batch.to(critic.backbone.device))
        device = predicted.device
        # Filled before any arithmetic: the gradient of a square is 0 * NaN where a masked target is NaN.
        masked = ~columns.get("loss_mask").to(device)
        per_token = value_loss(
            predicted.masked_fill(masked, 0.0),
            columns.get("values").to(device).masked_fill(masked, 0.0),
            columns.get("returns").to(device).masked_fill(masked, 0.0),
            clip_range=self.config.critic.clip_range,
        )
        loss = (columns.weights.to(device) * per_token).sum()
        _backward(loss, "the critic's loss")
        totals.add_loss("loss/value", float(loss.detach()))


def split_by_prompt(
    samples: Sequence[TrainingSample], count: int, *, seed: int, epoch: int
) -> list[list[TrainingSample]]:
    """Shuffle the groups and deal them into ``count`` minibatches; completions of one prompt stay together."""
    groups: dict[tuple[int, ...], list[TrainingSample]] = {}
    for sample in samples:
        groups.setdefault(sample.prompt_ids, []).append(sample)
    members = list(groups.values())
    order = shuffled(len(members), seed, "minibatches", epoch)
    dealt: list[list[TrainingSample]] = [[] for _ in range(min(count, len(members)))]
    for place, number in enumerate(order):
        dealt[place % len(dealt)] += members[number]
    return dealt


class _Columns:
    """Per-token fields of the samples of one micro-batch, flat [N] in the order of ``batch.targets``."""

    def __init__(self, samples: Sequence[TrainingSample], weights: Sequence[torch.Tensor], batch: PackedBatch) -> None:
        self.batch = batch
        self._samples = [samples[number] for number in batch.sequences.tolist()]
        self.weights = torch.cat([weights[number] for number in batch.sequences.tolist()])

    def get(self, name: str) -> torch.Tensor:
        return torch.cat([getattr(sample, name) for sample in self._samples])


def _weights(algorithm: Algorithm, samples: Sequence[TrainingSample]) -> list[torch.Tensor]:
    width = max(len(sample.loss_mask) for sample in samples)
    mask = torch.zeros(len(samples), width, dtype=torch.bool)
    for row, sample in enumerate(samples):
        mask[row, : len(sample.loss_mask)] = sample.loss_mask
    weights = algorithm.weighting(mask)
    return [weights[row, : len(sample.loss_mask)] for row, sample in enumerate(samples)]


def _require_finite(samples: Sequence[TrainingSample]) -> None:
    names = ("sampler_logprobs", "old_logprobs", "ref_logprobs", "advantages", "values", "returns")
    for number, sample in enumerate(samples):
        for name in names:
            kept = getattr(sample, name)[sample.loss_mask]
            if not bool(kept.isfinite().all()):
                raise NonFiniteError(
                    f"{name} of a completion hold NaN or infinity; no step was taken",
                    where=f"sample {number} of the iteration, prompt token ids {list(sample.prompt_ids)}",
                    fix="look at this completion in the rollout table: its reward, and the engine's log-probabilities",
                )


def _backward(loss: torch.Tensor, name: str) -> None:
    if not bool(loss.isfinite()):
        raise NonFiniteError(
            f"{name} is {float(loss.detach())}; no step was taken",
            fix="lower the learning rate, or look for a bad sample in the rollouts of this iteration",
        )
    loss.backward()  # type: ignore[no-untyped-call]
