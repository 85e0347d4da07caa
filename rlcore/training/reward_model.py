"""Reward-model training on preference pairs and ranked lists (Bradley-Terry)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from rlcore.algorithms.preference import bradley_terry, smoothed
from rlcore.config import RewardModelConfig
from rlcore.hardware.memory import filled_on, positions_on
from rlcore.hardware.out_of_memory import retry_unless_distributed
from rlcore.hardware.sharded import device_of, ranks_of, run_forward
from rlcore.models.architectures import pack_for
from rlcore.models.heads import ScalarHeadModel
from rlcore.seeding import shuffled
from rlcore.training.loss_scale import LossScale
from rlcore.training.optim import add_gradient, guarded_step, make_optimizer, make_scheduler
from rlcore.training.preferences import PreferenceSet, TokenPair, microbatches, preference_sets, side_indices

Report = Callable[[int, Mapping[str, float]], None]


def train_reward_model(
    model: ScalarHeadModel, pairs: Sequence[TokenPair], config: RewardModelConfig, *, seed: int, report: Report
) -> None:
    """Train ``model`` in place for ``num_epochs``; calls ``report(step, metrics)`` after each step.

    Raises:
        NonFiniteError: NaN or infinity in a loss or gradient; that step was not taken.
    """
    model.train_last_layers(config.backbone.trainable_layers)
    batches = minibatches(pairs, config, seed=seed)
    steps = RewardSteps(model, config, num_steps=len(batches))
    for number, sets in enumerate(batches, start=1):
        report(number, steps.take(sets))


def minibatches(pairs: Sequence[TokenPair], config: RewardModelConfig, *, seed: int) -> list[list[PreferenceSet]]:
    """Return the sets of all steps of ``num_epochs``, reshuffling every epoch."""
    sets = preference_sets(pairs)
    orders = [shuffled(len(sets), seed, "reward_model", epoch) for epoch in range(config.num_epochs)]
    return [
        [sets[i] for i in order[start : start + config.batch_size]]
        for order in orders
        for start in range(0, len(order), config.batch_size)
    ]


class RewardSteps:
    """Optimizer, schedule and loss scale of ``num_steps`` steps of one reward model."""

    def __init__(self, model: ScalarHeadModel, config: RewardModelConfig, *, num_steps: int) -> None:
        self._model, self._config, self._tokens = model, config, config.tokens_per_microbatch
        groups = [(model.backbone, config.learning_rate), (model.head, config.head_learning_rate)]
        self._optimizer = make_optimizer(groups, config.optim)
        self._scheduler = make_scheduler(self._optimizer, config.optim, num_steps=num_steps)
        self._loss_scale = LossScale.of(model.backbone)

    def take(self, sets: Sequence[PreferenceSet]) -> dict[str, float]:
        """Take one step; return its loss, the accuracy before it, and the gradient norm.

        Raises:
            NonFiniteError: NaN or infinity in a loss or gradient; the step was not taken.
        """
        ((loss, accuracy), self._tokens), norm, self._loss_scale = guarded_step(
            partial(_fitted, self._model, sets, self._config, self._tokens),
            self._optimizer,
            self._scheduler,
            max_grad_norm=self._config.optim.max_grad_norm,
            scale=self._loss_scale,
        )
        learning_rate = float(self._scheduler.get_last_lr()[0])
        return {"rm/loss": loss, "rm/accuracy": accuracy, "gradient_norm": norm, "learning_rate": learning_rate}


def _fitted(
    model: ScalarHeadModel, sets: Sequence[PreferenceSet], config: RewardModelConfig, tokens: int, scale: float
) -> tuple[tuple[float, float], int]:
    """Return the result of :func:`_accumulate`, and the tokens per micro-batch that fit into memory."""

    def attempt(tokens_per_microbatch: int) -> tuple[float, float]:
        model.zero_grad(set_to_none=True)
        smaller = dataclasses.replace(config, tokens_per_microbatch=tokens_per_microbatch)
        return _accumulate(model, sets, smaller, scale)

    sequences = [sequence for group in sets for sequence in group.sequences()]
    setting = "reward_model.tokens_per_microbatch"
    return retry_unless_distributed(model, attempt, tokens, sequences=sequences, setting=setting)


def _accumulate(
    model: ScalarHeadModel, sets: Sequence[PreferenceSet], config: RewardModelConfig, scale: float
) -> tuple[float, float]:
    """Add the gradient of a minibatch's loss times ``scale`` to the parameters; return loss and accuracy.

    The completions of a set stay together and share the row of their prompt.
    """
    ranks, comparisons = ranks_of(model), [one for group in sets for one in group.comparisons]
    total_weight = sum(one.weight for one in comparisons)
    loss_sum, num_right = 0.0, 0
    device, budget = device_of(model).type, config.tokens_per_microbatch
    for group in microbatches(sets, positions_on(device, budget), ranks, filled=filled_on(device, budget)):
        loss, right = run_forward(model, partial(_loss, model, group, config, total_weight))
        add_gradient(loss, scale=scale, name="the reward model's loss", ranks=ranks)
        loss_sum += float(loss.detach())
        num_right += right
    ranks.sum_gradients(parameter for parameter in model.parameters() if parameter.requires_grad)
    losses, counts = zip(*ranks.gather((loss_sum, num_right)), strict=True)
    return sum(losses), sum(counts) / len(comparisons)


def _loss(
    model: ScalarHeadModel, group: Sequence[PreferenceSet], config: RewardModelConfig, total_weight: float
) -> tuple[torch.Tensor, int]:
    """Return the contribution of a micro-batch to the loss, and the number of its correct comparisons."""
    chosen, rejected = _set_scores(model, group, config.tokens_per_microbatch)
    comparisons = [one for each in group for one in each.comparisons]
    probabilities = smoothed(chosen.new_tensor([one.probability for one in comparisons]), config.loss.label_smoothing)
    loss = bradley_terry(
        chosen,
        rejected,
        margins=chosen.new_tensor([one.margin + config.loss.margin for one in comparisons]),
        probabilities=probabilities,
        weights=chosen.new_tensor([one.weight / total_weight for one in comparisons]),
    )
    return loss, int((chosen > rejected).sum())


def _set_scores(
    model: ScalarHeadModel, sets: Sequence[PreferenceSet], budget: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scores of better and worse sides of each comparison [P], computing each completion once."""
    sequences = [sequence for group in sets for sequence in group.sequences()]
    batches = pack_for(model.backbone, sequences, tokens_per_microbatch=budget)
    scores = torch.cat([model.sequence_scores(batch.to(device_of(model))) for batch in batches])
    scores = scores[torch.cat([batch.sequences for batch in batches]).argsort().to(scores.device)]
    better, worse = side_indices(sets)
    return scores[better], scores[worse]
