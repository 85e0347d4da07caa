"""Reward-model training on preference pairs (Bradley-Terry), its held-out figures and its centring."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from rlcore.algorithms.preference import bradley_terry
from rlcore.config import RewardModelConfig
from rlcore.errors import NonFiniteError
from rlcore.models.heads import ScalarModel, score_rewards
from rlcore.packing import TokenSequence, pack
from rlcore.seeding import shuffled
from rlcore.training.optim import guarded_step, make_optimizer, make_scheduler

Report = Callable[[int, Mapping[str, float]], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenPair:
    """A preference pair as tokens. ``weight`` spreads one prompt's weight over its pairs; ``margin`` is in logits."""

    prompt_ids: tuple[int, ...]
    chosen_ids: tuple[int, ...]
    rejected_ids: tuple[int, ...]
    margin: float
    weight: float


def train_reward_model(
    model: ScalarModel, pairs: Sequence[TokenPair], config: RewardModelConfig, *, seed: int, report: Report
) -> None:
    """Train ``model`` in place for ``num_epochs``; ``report(step, metrics)`` is called after each step.

    Raises:
        NonFiniteError: NaN or infinity in a loss or gradient; that step was not taken.
    """
    model.train_last_layers(config.trainable_layers)
    groups = [(model.backbone, config.learning_rate), (model.head, config.head_learning_rate)]
    optimizer = make_optimizer(groups, config.optim)
    steps_per_epoch = -(-len(pairs) // config.batch_size)
    scheduler = make_scheduler(optimizer, config.optim, num_steps=config.num_epochs * steps_per_epoch)
    step = 0
    for epoch in range(config.num_epochs):
        order = shuffled(len(pairs), seed, "reward_model", epoch)
        for start in range(0, len(order), config.batch_size):
            chosen = [pairs[i] for i in order[start : start + config.batch_size]]
            loss, accuracy = _accumulate(model, chosen, config)
            norm = guarded_step(optimizer, scheduler, max_grad_norm=config.optim.max_grad_norm)
            step += 1
            learning_rate = float(scheduler.get_last_lr()[0])
            report(
                step,
                {"rm/loss": loss, "rm/accuracy": accuracy, "gradient_norm": norm, "learning_rate": learning_rate},
            )


def _accumulate(model: ScalarModel, pairs: Sequence[TokenPair], config: RewardModelConfig) -> tuple[float, float]:
    """Gradient of one minibatch; the two sides of a pair stay together, and share the row of their prompt."""
    total_weight = sum(pair.weight for pair in pairs)
    loss_sum, num_right = 0.0, 0
    for group in _microbatches(pairs, config.tokens_per_microbatch):
        batches = pack(pair_sequences(group), tokens_per_microbatch=config.tokens_per_microbatch)
        scores = torch.cat([model.sequence_scores(batch.to(model.backbone.device)) for batch in batches])
        scores = scores[torch.cat([batch.sequences for batch in batches]).argsort().to(scores.device)]
        chosen, rejected = scores[0::2], scores[1::2]
        margins = scores.new_tensor([pair.margin + config.margin for pair in group])
        weights = scores.new_tensor([pair.weight / total_weight for pair in group])
        loss = bradley_terry(chosen, rejected, margins, weights)
        if not bool(loss.isfinite()):
            raise NonFiniteError(
                f"the reward model's loss is {float(loss.detach())}", fix="lower reward_model.learning_rate"
            )
        loss.backward()  # type: ignore[no-untyped-call]
        loss_sum += float(loss.detach())
        num_right += int((chosen > rejected).sum())
    return loss_sum, num_right / len(pairs)


def _microbatches(pairs: Sequence[TokenPair], budget: int) -> list[list[TokenPair]]:
    """Cut a minibatch by the token budget, padding included: the longest first, so the first fixes the width."""
    ordered = sorted(pairs, key=_row_length, reverse=True)
    cut: list[list[TokenPair]] = []
    for pair in ordered:
        if cut and _row_length(cut[-1][0]) * (len(cut[-1]) + 1) <= budget:
            cut[-1].append(pair)
        else:
            cut.append([pair])
    return cut


def _row_length(pair: TokenPair) -> int:
    return len(pair.prompt_ids) + len(pair.chosen_ids) + len(pair.rejected_ids)


def pair_sequences(pairs: Sequence[TokenPair]) -> list[TokenSequence]:
    """Chosen and rejected in turn: sequence 2i is the chosen side of pair i."""
    return [
        TokenSequence(prompt_ids=pair.prompt_ids, completion_ids=side)
        for pair in pairs
        for side in (pair.chosen_ids, pair.rejected_ids)
    ]


def score_pairs(
    model: ScalarModel, pairs: Sequence[TokenPair], *, tokens_per_microbatch: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Raw scores of the chosen and the rejected sides, float32 [P] each."""
    scores = score_rewards(model, pair_sequences(pairs), tokens_per_microbatch=tokens_per_microbatch)
    return scores[0::2], scores[1::2]


@dataclass(frozen=True, kw_only=True, slots=True)
class Centring:
    """``reward = (score - shift) / scale``: mean 0 and std 1 over a reference set, stored with the model."""

    shift: float
    scale: float


def centre(scores: torch.Tensor) -> Centring:
    """Centring from the raw scores [S] of a reference set."""
    std = float(scores.std(unbiased=False))
    return Centring(shift=float(scores.mean()), scale=std if std > 1e-6 else 1.0)
