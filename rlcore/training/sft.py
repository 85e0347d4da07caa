"""Supervised fine-tuning: the loss is on the assistant's tokens alone, averaged over all such tokens of a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from transformers import PreTrainedModel

from rlcore.config import SftConfig
from rlcore.demonstrations import Demonstration
from rlcore.errors import DataError
from rlcore.models.batches import pack_for
from rlcore.models.policy import completion_loss, completion_states, state_scores
from rlcore.out_of_memory import fit, longest_of
from rlcore.packing import PackedBatch
from rlcore.seeding import shuffled
from rlcore.training.loss_scale import LossScale
from rlcore.training.optim import add_gradient, guarded_step, make_optimizer, make_scheduler

Report = Callable[[int, Mapping[str, float]], None]


def train_sft(
    model: PreTrainedModel,
    train: Sequence[Demonstration],
    held_out: Sequence[Demonstration],
    config: SftConfig,
    *,
    seed: int,
    report: Report,
) -> None:
    """Train ``model`` in place for ``num_steps`` steps; ``report(step, metrics)`` is called after each.

    Raises:
        DataError: there is nothing to train on.
        NonFiniteError: NaN or infinity in a loss or gradient; that step was not taken.
        TrainingError: one demonstration, or the optimizer's state, does not fit into memory.
    """
    if not train:
        raise DataError("there is no demonstration to train on", fix="look at the report of prepare_demonstrations")
    optimizer = make_optimizer([(model, config.learning_rate)], config.optim)
    scheduler = make_scheduler(optimizer, config.optim, num_steps=config.num_steps)
    loss_scale, tokens = LossScale.of(model), config.tokens_per_microbatch
    for step, minibatch in enumerate(minibatches(train, config, seed=seed), start=1):
        accumulate = partial(_fitted_gradient, model, minibatch, tokens, step)
        (loss, tokens), norm, loss_scale = guarded_step(
            accumulate, optimizer, scheduler, max_grad_norm=config.optim.max_grad_norm, scale=loss_scale
        )
        metrics = {
            "sft/loss": loss,
            "gradient_norm": norm,
            "learning_rate": float(scheduler.get_last_lr()[0]),
        }
        if step == config.num_steps or (config.eval_every and step % config.eval_every == 0):
            metrics["sft/eval_loss"] = mean_loss(model, held_out, tokens)
        report(step, metrics)


def _fitted_gradient(
    model: PreTrainedModel, minibatch: Sequence[Demonstration], tokens: int, step: int, scale: float
) -> tuple[float, int]:
    """The loss of :func:`accumulate_gradient`, and the tokens of a micro-batch with which it fits into memory."""

    def attempt(tokens_per_microbatch: int) -> float:
        model.zero_grad(set_to_none=True)
        return accumulate_gradient(model, minibatch, tokens_per_microbatch, step, scale)

    longest = longest_of([demonstration.sequence for demonstration in minibatch])
    return fit(attempt, tokens, longest=longest, setting="sft.tokens_per_microbatch")


def accumulate_gradient(
    model: PreTrainedModel, minibatch: Sequence[Demonstration], tokens_per_microbatch: int, step: int, scale: float
) -> float:
    """Add the gradient of the minibatch's mean loss times ``scale``; returns that loss, in nats per token.

    Raises:
        NonFiniteError: NaN or infinity in the loss; no step was taken.
    """
    num_tokens = sum(demonstration.num_trained for demonstration in minibatch)
    total = 0.0
    for batch in pack_trained(model, minibatch, tokens_per_microbatch=tokens_per_microbatch):
        placed = batch.to(model.device)
        states = completion_states(model, placed)
        loss = completion_loss(model, states, placed, lambda _, p, __: -p.sum() / num_tokens, by_token=True)
        add_gradient(loss, scale=scale, name=f"the SFT loss of step {step}")
        total += float(loss.detach())
    return total


def pack_trained(
    model: PreTrainedModel, demonstrations: Sequence[Demonstration], *, tokens_per_microbatch: int
) -> Iterator[PackedBatch]:
    """Micro-batches in which the tokens that count alone are predicted; the others are seen by those after them."""
    masks = [torch.tensor(demonstration.loss_mask) for demonstration in demonstrations]
    offsets = torch.tensor([0, *map(len, masks)]).cumsum(0)
    trained = torch.cat(masks)
    sequences = [demonstration.sequence for demonstration in demonstrations]
    for batch in pack_for(model, sequences, tokens_per_microbatch=tokens_per_microbatch):
        kept = trained[offsets[batch.sequence_index] + batch.token_index]
        yield dataclasses.replace(
            batch,
            predictors=batch.predictors[kept],
            targets=batch.targets[kept],
            sequence_index=batch.sequence_index[kept],
            token_index=batch.token_index[kept],
        )


def minibatches(train: Sequence[Demonstration], config: SftConfig, *, seed: int) -> Iterator[list[Demonstration]]:
    """``num_steps`` minibatches, epoch by epoch, each epoch in an order of its own."""
    order: list[int] = []
    epoch = 0
    for _ in range(config.num_steps):
        while len(order) < config.batch_size:
            order += shuffled(len(train), seed, "sft", epoch)
            epoch += 1
        chosen, order = order[: config.batch_size], order[config.batch_size :]
        yield [train[i] for i in chosen]


@torch.no_grad()
def mean_loss(model: PreTrainedModel, demonstrations: Sequence[Demonstration], tokens_per_microbatch: int) -> float:
    """Mean negative log-likelihood per token of the assistant, in nats."""
    logprobs = []
    for packed in pack_trained(model, demonstrations, tokens_per_microbatch=tokens_per_microbatch):
        batch = packed.to(model.device)
        logprobs.append(state_scores(model, completion_states(model, batch), batch))
    return -float(torch.cat(logprobs).mean())
