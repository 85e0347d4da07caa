"""Supervised fine-tuning: the loss is on the completion's tokens alone, averaged over all tokens of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from transformers import PreTrainedModel

from rlcore.config import SftConfig
from rlcore.errors import DataError, NonFiniteError
from rlcore.models.policy import completion_logprobs, score_sequences
from rlcore.packing import TokenSequence, pack
from rlcore.seeding import shuffled
from rlcore.training.optim import guarded_step, make_optimizer, make_scheduler

Report = Callable[[int, Mapping[str, float]], None]


def train_sft(
    model: PreTrainedModel,
    train: Sequence[TokenSequence],
    held_out: Sequence[TokenSequence],
    config: SftConfig,
    *,
    seed: int,
    report: Report,
) -> None:
    """Train ``model`` in place for ``num_steps`` steps; ``report(step, metrics)`` is called after each.

    Raises:
        DataError: there is nothing to train on.
        NonFiniteError: NaN or infinity in a loss or gradient; that step was not taken.
    """
    if not train:
        raise DataError("there is no demonstration to train on", fix="look at the report of prepare_demonstrations")
    optimizer = make_optimizer([(model, config.learning_rate)], config.optim)
    scheduler = make_scheduler(optimizer, config.optim, num_steps=config.num_steps)
    for step, minibatch in enumerate(minibatches(train, config, seed=seed), start=1):
        num_tokens = sum(len(sequence.completion_ids) for sequence in minibatch)
        total = 0.0
        for batch in pack(minibatch, tokens_per_microbatch=config.tokens_per_microbatch):
            logprobs, _ = completion_logprobs(model, batch.to(model.device))
            loss = -logprobs.sum() / num_tokens
            if not bool(loss.isfinite()):
                raise NonFiniteError(
                    f"the SFT loss is {float(loss.detach())} at step {step}", fix="lower sft.learning_rate"
                )
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        norm = guarded_step(optimizer, scheduler, max_grad_norm=config.optim.max_grad_norm)
        metrics = {
            "sft/loss": total,
            "gradient_norm": norm,
            "learning_rate": float(scheduler.get_last_lr()[0]),
        }
        if step == config.num_steps or (config.eval_every and step % config.eval_every == 0):
            metrics["sft/eval_loss"] = mean_loss(model, held_out, config.tokens_per_microbatch)
        report(step, metrics)


def minibatches(train: Sequence[TokenSequence], config: SftConfig, *, seed: int) -> Iterator[list[TokenSequence]]:
    """``num_steps`` minibatches, epoch by epoch, each epoch in an order of its own."""
    order: list[int] = []
    epoch = 0
    for _ in range(config.num_steps):
        while len(order) < config.batch_size:
            order += shuffled(len(train), seed, "sft", epoch)
            epoch += 1
        chosen, order = order[: config.batch_size], order[config.batch_size :]
        yield [train[i] for i in chosen]


def mean_loss(model: PreTrainedModel, sequences: Sequence[TokenSequence], tokens_per_microbatch: int) -> float:
    """Mean negative log-likelihood per completion token, in nats."""
    logprobs = score_sequences(model, sequences, tokens_per_microbatch=tokens_per_microbatch)
    return -float(torch.cat(logprobs).mean())
