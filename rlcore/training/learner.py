"""The learner: the policy (and the critic) that an iteration's experience updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from rlcore.algorithms.kl import KlController
from rlcore.algorithms.objective import Coefficients, LossInputs, LossOutput, policy_loss
from rlcore.algorithms.table import Algorithm
from rlcore.algorithms.values import value_loss
from rlcore.config import RlConfig
from rlcore.errors import NonFiniteError
from rlcore.models.heads import ScalarModel
from rlcore.models.policy import completion_logprobs
from rlcore.packing import PackedBatch, TokenSequence, pack
from rlcore.seeding import shuffled
from rlcore.training.optim import guarded_step, make_optimizer, make_scheduler
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
            NonFiniteError: NaN or infinity in a loss or gradient; the step that met it was not taken.
        """
        totals = _Totals()
        update = self.config.update
        moved = False
        for epoch in range(update.epochs):
            for minibatch in split_by_prompt(samples, update.minibatches, seed=seed, epoch=epoch):
                moved |= self._step(minibatch, totals)
            if update.max_kl > 0.0 and totals.mean("kl/old") > update.max_kl:
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

    def _step(self, samples: Sequence[TrainingSample], totals: _Totals) -> bool:
        """One optimizer step over a minibatch, its gradient accumulated over packed micro-batches."""
        weights = _weights(self.algorithm, samples)
        chosen = [i for i, sample in enumerate(samples) if self._has_gradient(sample)]
        sequences = [
            TokenSequence(prompt_ids=samples[i].prompt_ids, completion_ids=samples[i].completion_ids) for i in chosen
        ]
        trains_policy = self.policy_version >= self.config.critic.warmup_iterations or self.critic is None
        for batch in pack(sequences, tokens_per_microbatch=self.config.update.tokens_per_microbatch):
            picked = _Columns([samples[i] for i in chosen], [weights[i] for i in chosen], batch)
            if trains_policy:
                self._backward_policy(picked, totals)
            if self.critic is not None:
                self._backward_critic(self.critic, picked, totals)
        if self.critic is not None:
            norm = guarded_step(
                self.critic_optimizer, self.critic_scheduler, max_grad_norm=self.config.update.optim.max_grad_norm
            )
            totals.record("critic/gradient_norm", norm)
        if not trains_policy or not chosen:
            return False
        norm = guarded_step(self.optimizer, self.scheduler, max_grad_norm=self.config.update.optim.max_grad_norm)
        totals.record("gradient_norm", norm)
        return norm > 0.0

    def _has_gradient(self, sample: TrainingSample) -> bool:
        """A completion without advantage is left out before the forward pass where no other term needs it.

        Exact: it stays in the denominator, and adds 0 to the numerator.
        """
        other_terms = self._kl_in_loss > 0.0 or self.config.update.entropy_coefficient > 0.0
        return other_terms or self.critic is not None or bool(sample.advantages.any())

    @property
    def _kl_in_loss(self) -> float:
        return self.kl.coefficient if self.config.kl.placement == "loss" else 0.0

    def _backward_policy(self, columns: _Columns, totals: _Totals) -> None:
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

    def _backward_critic(self, critic: ScalarModel, columns: _Columns, totals: _Totals) -> None:
        values = critic.token_values(columns.batch.to(critic.backbone.device))
        device, mask = values.device, columns.get("loss_mask").to(values.device)
        per_token = value_loss(
            values,
            columns.get("values").to(device),
            columns.get("returns").to(device),
            clip_range=self.config.critic.clip_range,
        )
        loss = (columns.weights.to(device) * per_token).masked_fill(~mask, 0.0).sum()
        _backward(loss, "the critic's loss")
        totals.accumulate("loss/value", float(loss.detach()))


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


class _Totals:
    """Metrics of an update: sums over tokens, maxima, and averages over steps."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._maxima: dict[str, float] = {}
        self._steps: dict[str, list[float]] = {}
        self._num_tokens = 0
        self._num_losses: dict[str, float] = {}

    def add(self, output: LossOutput) -> None:
        self._num_tokens += output.num_tokens
        for name, value in output.sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + float(value)
        for name, value in output.maxima.items():
            self._maxima[name] = max(self._maxima.get(name, 0.0), float(value))
        self.accumulate("loss/policy", float(output.loss.detach()))

    def accumulate(self, name: str, value: float) -> None:
        self._num_losses[name] = self._num_losses.get(name, 0.0) + value

    def record(self, name: str, value: float) -> None:
        self._steps.setdefault(name, []).append(value)

    def mean(self, name: str) -> float:
        return self._sums.get(name, 0.0) / max(1, self._num_tokens)

    def means(self) -> dict[str, float]:
        num_steps = max(1, max((len(values) for values in self._steps.values()), default=1))
        result = {name: self.mean(name) for name in self._sums}
        weight, squared = result.pop("mismatch/weight", 1.0), result.pop("mismatch/weight_squared", 1.0)
        if self._num_tokens:
            result["mismatch/ess"] = weight**2 / squared if squared else 0.0
            result["clip/fraction"] = result["clip/low"] + result["clip/high"]
        result |= self._maxima
        result |= {name: total / num_steps for name, total in self._num_losses.items()}
        result |= {name: sum(values) / len(values) for name, values in self._steps.items()}
        return result


def _weights(algorithm: Algorithm, samples: Sequence[TrainingSample]) -> list[torch.Tensor]:
    width = max(len(sample.loss_mask) for sample in samples)
    mask = torch.zeros(len(samples), width, dtype=torch.bool)
    for row, sample in enumerate(samples):
        mask[row, : len(sample.loss_mask)] = sample.loss_mask
    weights = algorithm.weighting(mask)
    return [weights[row, : len(sample.loss_mask)] for row, sample in enumerate(samples)]


def _backward(loss: torch.Tensor, name: str) -> None:
    if not bool(loss.isfinite()):
        raise NonFiniteError(
            f"{name} is {float(loss.detach())}; no step was taken",
            fix="lower the learning rate, or look for a bad sample in the rollouts of this iteration",
        )
    loss.backward()  # type: ignore[no-untyped-call]
