"""Learner: policy, critic and optimizers, updated with each iteration's experience.

Every rank has all samples and computes its fraction. Loss weights cover the whole step. Gradients and statistics are
summed over the ranks, so all ranks take the same decisions and steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn
from transformers import PreTrainedModel

from rlcore.algorithms.kl import KlController
from rlcore.algorithms.objective import Coefficients
from rlcore.algorithms.table import Algorithm
from rlcore.config import OptimConfig, RlConfig
from rlcore.errors import NonFiniteError
from rlcore.hardware.out_of_memory import retry_unless_distributed
from rlcore.hardware.sharded import ranks_of
from rlcore.models.architectures import pack_for, rank_indices
from rlcore.models.heads import ScalarHeadModel
from rlcore.progress import advance
from rlcore.training.losses import StepLosses
from rlcore.training.minibatches import (
    Columns,
    digest,
    digest_of_digests,
    num_policy_tokens,
    require_finite,
    require_same,
    split_by_group,
    token_sequences,
    token_weights,
)
from rlcore.training.optim import (
    LossScale,
    add_gradient,
    clip_gradient,
    make_optimizer,
    make_scheduler,
    parameters_of,
    set_schedule_step,
    take_step,
    zero_grad,
)
from rlcore.training.update_stats import StatAccumulator, UpdateStats, after_skips
from rlcore.types import TrainingSample

SETTING = "update.tokens_per_microbatch"
ROUNDING = 1e-6  # gradient norm; a policy equal to its reference has 6e-9 from float32 rounding


class Learner:
    """Owner of all training state: weights, optimizers, schedules, KL coefficients, policy version."""

    def __init__(
        self, policy: PreTrainedModel, critic: ScalarHeadModel | None, *, algorithm: Algorithm, config: RlConfig
    ) -> None:
        self.policy, self.critic = policy, critic
        self.algorithm, self.config = algorithm, config
        self.ranks = ranks_of(policy)
        update = config.update
        num_steps = config.num_iterations * update.num_epochs * update.num_minibatches
        groups: list[tuple[nn.Module, float]] = [(policy, config.learning_rate)]
        if critic is not None and self.shares_backbone:
            groups.append((critic.head, config.critic.learning_rate))
        self.optimizer = make_optimizer(groups, update.optim)
        self.schedulers = [make_scheduler(self.optimizer, update.optim, num_steps=num_steps)]
        if critic is not None and not self.shares_backbone:
            self.critic_optimizer = make_optimizer([(critic, config.critic.learning_rate)], self._critic_optim)
            self.schedulers.append(make_scheduler(self.critic_optimizer, self._critic_optim, num_steps=num_steps))
        self.kl = KlController(coefficient=config.kl.coefficient, target=config.kl.target, horizon=config.kl.horizon)
        self.penalty = algorithm.penalty
        self.loss_scale = LossScale.of(policy) if critic is None else LossScale.of(policy, critic.backbone)
        self.tokens_per_microbatch = update.tokens_per_microbatch  # reduced when memory runs out
        self.policy_version = self.steps_taken = 0  # steps of the policy's optimizer in this process
        self.num_skipped = 0  # consecutive steps with NaN or infinity
        self._has_moved, self.step_of_update = False, 0  # within an update; skipped steps count
        self._skipped, self._accumulated = list[str](), list[str]()  # errors of skipped steps; digests of samples

    @property
    def shares_backbone(self) -> bool:
        """True if the critic is a head on the policy's backbone, trained by the policy's optimizer."""
        return self.critic is not None and self.critic.backbone is self.policy

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Optimizer of the policy, and that of the critic if it has its own."""
        own = self.critic is not None and not self.shares_backbone
        return [self.optimizer, self.critic_optimizer] if own else [self.optimizer]

    @property
    def value_module(self) -> nn.Module | None:
        """Module that only the critic uses: its backbone or adapter with head, or the head alone."""
        return self.critic.head if self.critic is not None and self.shares_backbone else self.critic

    def update(self, samples: Sequence[TrainingSample], *, seed: int) -> UpdateStats:
        """Train on the samples of one iteration.

        Raises:
            NonFiniteError: NaN or infinity in a sample, or in more than ``max_skipped_steps`` consecutive steps.
            TrainingError: One sequence, or the optimizer's state, does not fit into memory.
        """
        require_finite(samples)
        require_same(samples, self.ranks)
        totals, update, self._has_moved, self._skipped = StatAccumulator(), self.config.update, False, []
        arrived = list[list[str]]()
        for epoch in range(update.num_epochs):
            totals.begin_epoch()
            arrived.append([])
            for index, minibatch in enumerate(split_by_group(samples, update.num_minibatches, seed=seed, epoch=epoch)):
                self.step_of_update, self._accumulated = epoch * update.num_minibatches + index, []
                self._seek_schedules(self.step_of_update)
                totals = self._step(minibatch, totals)
                arrived[-1].append(digest_of_digests(self._accumulated))
            if totals.exceeded_kl(update):
                break
        if not (measured := totals.num_tokens / (epoch + 1)):  # no sample has a gradient, or only the critic is trained
            totals = self._fit(partial(self._losses().measure, samples, totals, self.ranks, seed), samples)
            measured = totals.num_tokens
        zero_grad(self.policy, self.critic)  # left by skipped steps
        self.policy_version += 1
        self._seek_schedules(0)
        metrics = totals.means() | self._rates() | totals.early_stop_metrics(update, num_epochs=epoch + 1)
        metrics |= {"update/token_fraction": measured / num_policy_tokens(samples)} | self._adapt_penalty(samples)
        return UpdateStats(
            policy_version=self.policy_version,
            moved=self._has_moved,
            metrics=after_skips(metrics, len(self._skipped)),
            skipped=tuple(self._skipped),
            arrived=tuple(tuple(map(tuple, epochs)) for epochs in self.ranks.gather(arrived)),
            epoch_kl=totals.epoch_kl,
            first_tokens=totals.first_tokens,
        )

    def trial(
        self, samples: Sequence[TrainingSample], *, tokens: int | None = None, moved: bool = False
    ) -> dict[str, float]:
        """Return losses and KL of a step on ``samples`` by name; leave its gradient on the parameters, take no step."""
        self._has_moved = moved
        found = self._accumulate(samples, StatAccumulator(), tokens or self.tokens_per_microbatch)
        return {name: value for name, value in found.means().items() if name.startswith(("loss/", "kl/"))}

    def _rates(self) -> dict[str, float]:
        metrics = {
            "policy_version": float(self.policy_version),
            "learning_rate": float(self.schedulers[0].get_last_lr()[0]),
            "kl/coefficient": self.kl.coefficient,
        }
        if self.penalty is not None:
            metrics["kl/penalty_coefficient"] = self.penalty.coefficient
        if self.critic is not None:
            metrics["critic/learning_rate"] = float(self.schedulers[-1].get_last_lr()[-1])
        return metrics

    def _seek_schedules(self, step_of_update: int) -> None:
        """Set the schedules to the planned step, since skips, early stops and critic warm-up take fewer steps."""
        update = self.config.update
        step = self.policy_version * update.num_epochs * update.num_minibatches + step_of_update
        for scheduler in self.schedulers:
            set_schedule_step(scheduler, step)

    def observe_kl(self, mean_kl: float, num_samples: int) -> None:
        """Update the adaptive KL coefficient with the mean KL of an iteration (nats per completion)."""
        self.kl = self.kl.updated(mean_kl, num_samples)

    def _adapt_penalty(self, samples: Sequence[TrainingSample]) -> dict[str, float]:
        if self.penalty is None or not self._has_moved:
            return {}
        measured = self._losses().kl_from_old(samples, tokens_per_microbatch=self.tokens_per_microbatch)
        self.penalty = self.penalty.updated(measured)
        return {"kl/after_update": measured}

    def _step(self, samples: Sequence[TrainingSample], totals: StatAccumulator) -> StatAccumulator:
        """Take one optimizer step over a minibatch; return the updated totals.

        A float16 overflow is retried with a smaller loss scale, out of memory with smaller micro-batches. A gradient
        that is still not finite is skipped.
        """
        scale = self.loss_scale
        while True:
            try:
                counted = self._fit(partial(self._accumulate, samples, totals), samples)
            except NonFiniteError as error:
                return self._without(error, totals)
            try:
                self._take_steps(counted)
            except NonFiniteError as error:
                if not self.loss_scale.can_shrink:
                    self.loss_scale = scale  # the loss scale was not the cause
                    return self._without(error, totals)
                self.loss_scale = self.loss_scale.after_overflow()
                continue
            self.loss_scale = self.loss_scale.after_step()
            return counted

    def _without(self, error: NonFiniteError, before: StatAccumulator) -> StatAccumulator:
        """Skip a step and return the totals before it; raise the error after too many consecutive skips.

        The last iteration skips no step, since no later step would show a healthy policy.
        """
        self.num_skipped += 1
        limit = self.config.update.max_skipped_steps if self.policy_version + 1 < self.config.num_iterations else 0
        if self.num_skipped > limit:
            raise error
        self._skipped.append(error.what)
        return before

    def _fit(self, work: Callable[[int], StatAccumulator], samples: Sequence[TrainingSample]) -> StatAccumulator:
        totals, self.tokens_per_microbatch = retry_unless_distributed(
            self.policy, work, self.tokens_per_microbatch, sequences=token_sequences(samples), setting=SETTING
        )
        return totals

    def _accumulate(
        self, samples: Sequence[TrainingSample], before: StatAccumulator, tokens_per_microbatch: int
    ) -> StatAccumulator:
        self._accumulated = [digest(sample) for sample in samples]
        totals = before.rank_fraction(self.ranks)
        weights = token_weights(self.algorithm, samples)
        losses = self._losses()
        chosen = [i for i, sample in enumerate(samples) if losses.has_gradient(sample)]
        sequences = token_sequences([samples[i] for i in chosen])
        mine = rank_indices(self.policy, sequences, tokens_per_microbatch=tokens_per_microbatch)
        trained, counted = [samples[chosen[i]] for i in mine], [weights[chosen[i]] for i in mine]
        zero_grad(self.policy, self.critic)  # an aborted update may have left some
        batches = pack_for(self.policy, token_sequences(trained), tokens_per_microbatch=tokens_per_microbatch)
        for number, batch in enumerate(batches):
            self._show_progress(number / len(batches))
            for loss, name in losses.each(Columns(trained, counted, batch), totals):
                add_gradient(loss, scale=self.loss_scale.value, name=name, ranks=self.ranks)
        for parameters in self._learning_parameters():
            self.ranks.sum_gradients(parameters)
        return totals.merged(self.ranks)

    def _show_progress(self, fraction: float) -> None:
        done, total = self.step_of_update, self.config.update.num_epochs * self.config.update.num_minibatches
        advance("minibatches", done, total, fraction=(done + fraction) / total)

    def _take_steps(self, totals: StatAccumulator) -> None:
        """Step with the accumulated gradients; both are checked before either model changes.

        The policy takes no step if its gradient is zero except for rounding, because momentum alone would move it.
        """
        learning, own = self._learning_parameters()
        scale = self.loss_scale.value
        norm = clip_gradient(learning, max_grad_norm=self.config.update.optim.max_grad_norm, scale=scale)
        if own:
            critic_norm = clip_gradient(own, max_grad_norm=self._critic_optim.max_grad_norm, scale=scale)
            totals.record("critic/gradient_norm", critic_norm)
        totals.record("gradient_norm", norm)
        moves = norm > ROUNDING
        if self.shares_backbone and not moves:
            for parameter in learning:
                parameter.grad = None  # the head's step must not move the policy by momentum
        elif self.critic is not None and not self.shares_backbone:
            take_step(self.critic_optimizer)
        if moves or self.shares_backbone:
            take_step(self.optimizer)
            self.steps_taken += 1
        self._has_moved, self.num_skipped = self._has_moved or moves, 0 if moves else self.num_skipped

    def _learning_parameters(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Return the policy's and the critic's own parameters; a shared critic's head is last in the optimizer."""
        learning = parameters_of(self.optimizer)
        if self.shares_backbone:
            return learning[:-1], learning[-1:]
        return learning, parameters_of(self.critic_optimizer) if self.critic is not None else []

    @property
    def _critic_optim(self) -> OptimConfig:
        return self.config.critic.optim or self.config.update.optim

    @property
    def _coefficients(self) -> Coefficients:
        config = self.config
        return Coefficients(
            kl=self.kl.coefficient if config.kl.apply_to == "loss" else 0.0,
            kl_estimator=config.kl.estimator,
            entropy=config.update.entropy_coefficient,
            mismatch=config.update.rollout_correction,
            penalty=self.penalty.coefficient if self.penalty else 0.0,
        )

    def _losses(self) -> StepLosses:
        return StepLosses(
            policy=self.policy,
            critic=self.critic,
            algorithm=self.algorithm,
            config=self.config,
            coefficients=self._coefficients,
            trains_policy=self.critic is None or self.policy_version >= self.config.critic.warmup_iterations,
            starts_at_one=not self._has_moved,
        )
