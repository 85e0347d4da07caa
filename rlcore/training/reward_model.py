"""Reward-model training on preference pairs and ranked lists (Bradley-Terry)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from rlcore.algorithms.preference import bradley_terry, smoothed
from rlcore.config import RewardModelConfig
from rlcore.models.batches import pack_for
from rlcore.models.heads import ScalarModel
from rlcore.out_of_memory import fit, longest_of
from rlcore.seeding import shuffled
from rlcore.training.loss_scale import LossScale
from rlcore.training.optim import add_gradient, guarded_step, make_optimizer, make_scheduler
from rlcore.training.preferences import PreferenceSet, TokenPair, microbatches, places_of, preference_sets

Report = Callable[[int, Mapping[str, float]], None]


def train_reward_model(
    model: ScalarModel, pairs: Sequence[TokenPair], config: RewardModelConfig, *, seed: int, report: Report
) -> None:
    """Train ``model`` in place for ``num_epochs``; ``report(step, metrics)`` is called after each step.

    Raises:
        NonFiniteError: NaN or infinity in a loss or gradient; that step was not taken.
    """
    model.train_last_layers(config.trunk.trainable_layers)
    groups = [(model.backbone, config.learning_rate), (model.head, config.head_learning_rate)]
    optimizer = make_optimizer(groups, config.optim)
    sets = preference_sets(pairs)
    steps_per_epoch = -(-len(sets) // config.batch_size)
    scheduler = make_scheduler(optimizer, config.optim, num_steps=config.num_epochs * steps_per_epoch)
    loss_scale, tokens = LossScale.of(model.backbone), config.tokens_per_microbatch
    step = 0
    for epoch in range(config.num_epochs):
        order = shuffled(len(sets), seed, "reward_model", epoch)
        for start in range(0, len(order), config.batch_size):
            chosen = [sets[i] for i in order[start : start + config.batch_size]]
            ((loss, accuracy), tokens), norm, loss_scale = guarded_step(
                partial(_fitted, model, chosen, config, tokens),
                optimizer,
                scheduler,
                max_grad_norm=config.optim.max_grad_norm,
                scale=loss_scale,
            )
            step += 1
            learning_rate = float(scheduler.get_last_lr()[0])
            report(
                step,
                {"rm/loss": loss, "rm/accuracy": accuracy, "gradient_norm": norm, "learning_rate": learning_rate},
            )


def _fitted(
    model: ScalarModel, sets: Sequence[PreferenceSet], config: RewardModelConfig, tokens: int, scale: float
) -> tuple[tuple[float, float], int]:
    """What :func:`_accumulate` gives, and the tokens of a micro-batch with which it fits into memory."""

    def attempt(tokens_per_microbatch: int) -> tuple[float, float]:
        model.zero_grad(set_to_none=True)
        smaller = dataclasses.replace(config, tokens_per_microbatch=tokens_per_microbatch)
        return _accumulate(model, sets, smaller, scale)

    longest = longest_of([sequence for group in sets for sequence in group.sequences()])
    return fit(attempt, tokens, longest=longest, setting="reward_model.tokens_per_microbatch")


def _accumulate(
    model: ScalarModel, sets: Sequence[PreferenceSet], config: RewardModelConfig, scale: float
) -> tuple[float, float]:
    """Loss and accuracy of one minibatch, its gradient times ``scale`` added to the parameters.

    The completions of a set stay together, and share the row of their prompt.
    """
    comparisons = [one for group in sets for one in group.comparisons]
    total_weight = sum(one.weight for one in comparisons)
    loss_sum, num_right = 0.0, 0
    for group in microbatches(sets, config.tokens_per_microbatch):
        chosen, rejected = _set_scores(model, group, config.tokens_per_microbatch)
        judged = [one for each in group for one in each.comparisons]
        probabilities = smoothed(chosen.new_tensor([one.probability for one in judged]), config.loss.label_smoothing)
        loss = bradley_terry(
            chosen,
            rejected,
            margins=chosen.new_tensor([one.margin + config.loss.margin for one in judged]),
            probabilities=probabilities,
            weights=chosen.new_tensor([one.weight / total_weight for one in judged]),
        )
        add_gradient(loss, scale=scale, name="the reward model's loss")
        loss_sum += float(loss.detach())
        num_right += int((chosen > rejected).sum())
    return loss_sum, num_right / len(comparisons)


def _set_scores(model: ScalarModel, sets: Sequence[PreferenceSet], budget: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores of the better and of the worse side of each comparison [P]; each completion is computed once."""
    sequences = [sequence for group in sets for sequence in group.sequences()]
    batches = pack_for(model.backbone, sequences, tokens_per_microbatch=budget)
    scores = torch.cat([model.sequence_scores(batch.to(model.backbone.device)) for batch in batches])
    scores = scores[torch.cat([batch.sequences for batch in batches]).argsort().to(scores.device)]
    better, worse = places_of(sets)
    return scores[better], scores[worse]
