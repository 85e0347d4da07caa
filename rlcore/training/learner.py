"""The learner: the policy (and the critic) that an iteration's experience updates."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from transformers import PreTrainedModel

from rlcore.algorithms.kl import KlController
from rlcore.algorithms.objective import Coefficients
from rlcore.algorithms.table import Algorithm
from rlcore.algorithms.values import value_loss
from rlcore.config import OptimConfig, RlConfig
from rlcore.errors import NonFiniteError
from rlcore.models.batches import pack_for
from rlcore.models.heads import ScalarModel
from rlcore.models.policy import completion_loss, completion_states
from rlcore.out_of_memory import fit
from rlcore.packing import PackedBatch, TokenSequence
from rlcore.training.loss_scale import LossScale
from rlcore.training.minibatches import Columns, split_by_prompt, token_weights
from rlcore.training.optim import add_gradient, clip_gradient, make_optimizer, make_scheduler, parameters_of, take_step
from rlcore.training.policy_terms import PolicyTerms
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
        groups: list[tuple[nn.Module, float]] = [(policy, config.learning_rate)]
        if critic is not None and self.shares_trunk:
            groups.append((critic.head, config.critic.learning_rate))
        self.optimizer = make_optimizer(groups, update.optim)
        self.scheduler = make_scheduler(self.optimizer, update.optim, num_steps=num_steps)
        if critic is not None and not self.shares_trunk:
            self.critic_optimizer = make_optimizer([(critic, config.critic.learning_rate)], self._critic_optim)
            self.critic_scheduler = make_scheduler(self.critic_optimizer, self._critic_optim, num_steps=num_steps)
        self.kl = KlController(coefficient=config.kl.coefficient, target=config.kl.target, horizon=config.kl.horizon)
        self.loss_scale = LossScale.of(policy) if critic is None else LossScale.of(policy, critic.backbone)
        self.tokens_per_microbatch = update.tokens_per_microbatch  # less where memory has run out
        self.policy_version = 0
        self._has_moved = False  # within an update

    @property
    def shares_trunk(self) -> bool:
        """Whether the critic is a head on the policy's own trunk, in the policy's optimizer."""
        return self.critic is not None and self.critic.backbone is self.policy

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The policy's, and the critic's where it has one of its own."""
        own = self.critic is not None and not self.shares_trunk
        return [self.optimizer, self.critic_optimizer] if own else [self.optimizer]

    @property
    def value_module(self) -> nn.Module | None:
        """What the critic has to itself: its trunk or adapter with the head, or the head alone."""
        return self.critic.head if self.critic is not None and self.shares_trunk else self.critic

    @property
    def needs_old_logprobs(self) -> bool:
        """Until the policy moves, its own detached forward pass is the old policy: a single step needs no other."""
        return self.config.update.epochs * self.config.update.minibatches > 1

    def update(self, samples: Sequence[TrainingSample], *, seed: int) -> UpdateStats:
        """Train on the samples of one iteration.

        Raises:
            NonFiniteError: NaN or infinity in a sample, a loss or a gradient; the step that met it was not taken.
            TrainingError: one sequence, or the optimizer's state, does not fit into memory.
        """
        _require_finite(samples)
        totals = Totals()
        update = self.config.update
        self._has_moved = False
        for epoch in range(update.epochs):
            totals.begin_epoch()
            for minibatch in split_by_prompt(samples, update.minibatches, seed=seed, epoch=epoch):
                totals = self._step(minibatch, totals)
            if self._went_far(totals):
                break
        self.policy_version += 1
        metrics = totals.means() | {
            "policy_version": float(self.policy_version),
            "learning_rate": float(self.scheduler.get_last_lr()[0]),
            "kl/coefficient": self.kl.coefficient,
        }
        if self.critic is not None:
            scheduler = self.scheduler if self.shares_trunk else self.critic_scheduler
            metrics["critic/learning_rate"] = float(scheduler.get_last_lr()[-1])
        if update.max_kl > 0.0 or update.max_ref_kl > 0.0:
            metrics["update/epochs"] = epoch + 1.0
        if update.max_ref_kl > 0.0:
            metrics["kl/ref_last_epoch"] = totals.epoch_ref_kl()
        return UpdateStats(policy_version=self.policy_version, moved=self._has_moved, metrics=metrics)

    def observe_kl(self, mean_kl: float, num_samples: int) -> None:
        """Let the adaptive coefficient see the KL of an iteration (nats per completion)."""
        self.kl = self.kl.updated(mean_kl, num_samples)

    def _went_far(self, totals: Totals) -> bool:
        """Whether the epoch's mean KL to the old policy or to the reference is above its limit."""
        update = self.config.update
        from_old = update.max_kl > 0.0 and totals.epoch_mean("kl/old") > update.max_kl
        return from_old or (update.max_ref_kl > 0.0 and totals.epoch_ref_kl() > update.max_ref_kl)

    def _step(self, samples: Sequence[TrainingSample], totals: Totals) -> Totals:
        """One optimizer step over a minibatch; returns the totals with it.

        A gradient that overflows float16 is computed again from a smaller scale of the loss, and one that runs out of
        memory in smaller micro-batches; each is counted once.
        """
        longest = max(len(sample.prompt_ids) + len(sample.completion_ids) for sample in samples)
        while True:
            counted, self.tokens_per_microbatch = fit(
                partial(self._accumulate, samples, totals),
                self.tokens_per_microbatch,
                longest=longest,
                setting="update.tokens_per_microbatch",
            )
            try:
                self._take_steps(counted)
            except NonFiniteError:
                if not self.loss_scale.can_shrink:
                    raise
                self.loss_scale = self.loss_scale.after_overflow()
                continue
            self.loss_scale = self.loss_scale.after_step()
            return counted

    def _accumulate(self, samples: Sequence[TrainingSample], before: Totals, tokens_per_microbatch: int) -> Totals:
        """The gradient of a minibatch, over packed micro-batches; returns the totals with it."""
        totals = copy.deepcopy(before)
        weights = token_weights(self.algorithm, samples)
        chosen = [i for i, sample in enumerate(samples) if self._has_gradient(sample)]
        sequences = [
            TokenSequence(prompt_ids=samples[i].prompt_ids, completion_ids=samples[i].completion_ids) for i in chosen
        ]
        self._clear_gradients()  # an update that was given up may have left some behind
        for batch in pack_for(self.policy, sequences, tokens_per_microbatch=tokens_per_microbatch):
            picked = Columns([samples[i] for i in chosen], [weights[i] for i in chosen], batch)
            if self.critic is not None and self.shares_trunk:
                self._backward_shared(self.critic, picked, totals)
                continue
            if self._trains_policy:
                self._backward_policy(picked, totals)
            if self.critic is not None:
                self._backward_critic(self.critic, picked, totals)
        return totals

    def _take_steps(self, totals: Totals) -> None:
        """Step with what was accumulated; both gradients are checked before either model moves.

        Where the policy's gradient is zero it takes no step, since momentum alone would move it.
        """
        learning, own = self._learning_parameters()
        scale = self.loss_scale.value
        norm = clip_gradient(learning, max_grad_norm=self.config.update.optim.max_grad_norm, scale=scale)
        if own:
            critic_norm = clip_gradient(own, max_grad_norm=self._critic_optim.max_grad_norm, scale=scale)
            totals.record("critic/gradient_norm", critic_norm)
        if self._trains_policy:
            totals.record("gradient_norm", norm)
        if self.shares_trunk and norm == 0.0:
            for parameter in learning:
                parameter.grad = None  # the head's step must not move the policy by momentum
        elif self.critic is not None and not self.shares_trunk:
            take_step(self.critic_optimizer, self.critic_scheduler)
        if norm > 0.0 or self.shares_trunk:
            take_step(self.optimizer, self.scheduler)
        self._has_moved |= norm > 0.0

    def _learning_parameters(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """The policy's, and what the critic has to itself; a head on the policy's trunk is its optimizer's last."""
        learning = parameters_of(self.optimizer)
        if self.shares_trunk:
            return learning[:-1], learning[-1:]
        return learning, parameters_of(self.critic_optimizer) if self.critic is not None else []

    @property
    def _critic_optim(self) -> OptimConfig:
        return self.config.critic.optim or self.config.update.optim

    @property
    def _trains_policy(self) -> bool:
        return self.critic is None or self.policy_version >= self.config.critic.warmup_iterations

    def _clear_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        if self.critic is not None:
            self.critic.zero_grad(set_to_none=True)

    def _has_gradient(self, sample: TrainingSample) -> bool:
        """A completion without advantage is left out before the forward pass where no other term needs it.

        Exact: it stays in the denominator, and adds 0 to the numerator.
        """
        other_terms = self._kl_in_loss > 0.0 or self.config.update.entropy_coefficient > 0.0
        return other_terms or self.critic is not None or bool(sample.advantages.any())

    @property
    def _kl_in_loss(self) -> float:
        return self.kl.coefficient if self.config.kl.placement == "loss" else 0.0

    def _backward_policy(self, columns: Columns, totals: Totals) -> None:
        batch = columns.batch.to(self.policy.device)
        loss = self._policy_loss(columns, completion_states(self.policy, batch), batch, totals)
        add_gradient(loss, scale=self.loss_scale.value, name="the policy's loss")

    def _backward_critic(self, critic: ScalarModel, columns: Columns, totals: Totals) -> None:
        predicted = critic.token_values(columns.batch.to(critic.backbone.device))
        add_gradient(
            self._value_loss(columns, predicted, totals), scale=self.loss_scale.value, name="the critic's loss"
        )

    def _backward_shared(self, critic: ScalarModel, columns: Columns, totals: Totals) -> None:
        """Both losses from one forward pass; with ``detach``, and during warm-up, the critic's spares the trunk."""
        batch = columns.batch.to(self.policy.device)
        with torch.set_grad_enabled(self._trains_policy):
            states = completion_states(self.policy, batch)
        spares = self.config.critic.detach or not self._trains_policy
        values = critic.state_values(states.detach() if spares else states)
        loss = self.config.critic.coefficient * self._value_loss(columns, values, totals)
        if self._trains_policy:
            loss = loss + self._policy_loss(columns, states, batch, totals)
        add_gradient(loss, scale=self.loss_scale.value, name="the loss of policy and critic")

    def _policy_loss(self, columns: Columns, states: torch.Tensor, batch: PackedBatch, totals: Totals) -> torch.Tensor:
        coefficients = Coefficients(
            kl=self._kl_in_loss,
            kl_estimator=self.config.kl.estimator,
            entropy=self.config.update.entropy_coefficient,
            mismatch=self.config.update.mismatch,
        )
        terms = PolicyTerms(
            algorithm=self.algorithm,
            coefficients=coefficients,
            columns=columns,
            totals=totals,
            starts_at_one=not self._has_moved,
            tracks_reference=self.config.update.max_ref_kl > 0.0,
        )
        return completion_loss(
            self.policy,
            states,
            batch,
            terms,
            temperature=self.config.sampling.temperature,
            entropy_gradient=coefficients.entropy > 0.0,
            by_token=terms.by_token,
        )

    def _value_loss(self, columns: Columns, predicted: torch.Tensor, totals: Totals) -> torch.Tensor:
        device = predicted.device
        # Filled before any arithmetic: the gradient of a square is 0 * NaN where a masked target is NaN.
        masked = ~columns.get("loss_mask").to(device)
        per_token = value_loss(
            predicted.masked_fill(masked, 0.0),
            columns.get("values").to(device).masked_fill(masked, 0.0),
            columns.get("returns").to(device).masked_fill(masked, 0.0),
            clip_range=self.config.critic.clip_range,
            huber_delta=self.config.critic.huber_delta,
        )
        loss = (columns.weights.to(device) * per_token).sum()
        totals.add_loss("loss/value", float(loss.detach()))
        return loss


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
