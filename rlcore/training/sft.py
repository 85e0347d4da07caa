"""Supervised fine-tuning on the assistant's tokens, with a loss averaged over all such tokens of a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel

from rlcore.config import SftConfig
from rlcore.errors import DataError
from rlcore.hardware.sharded import device_of, ranks_of, run_forward
from rlcore.models.architectures import pack_for, rank_indices
from rlcore.models.policy import completion_loss, completion_states, state_scores
from rlcore.models.runtime import save_trained
from rlcore.progress import advance
from rlcore.seeding import shuffled
from rlcore.text.demonstrations import Demonstration
from rlcore.text.packing import PackedBatch
from rlcore.training.audit.shuffle_gap import ShuffleGap, measure_shuffle_gap
from rlcore.training.optim import Report, Stepper, add_gradient


class SftLearner:
    """Supervised training of a model of this process, which may be one of several ranks."""

    def __init__(self, model: PreTrainedModel, config: SftConfig) -> None:
        self.model, self._count = model, 0
        self._steps = Stepper(
            model,
            [(model, config.learning_rate)],
            config.optim,
            num_steps=config.num_steps,
            tokens=config.tokens_per_microbatch,
            setting="sft.tokens_per_microbatch",
        )

    def step(self, minibatch: Sequence[Demonstration]) -> dict[str, float]:
        """Take one step; return its loss in nats per token, the gradient norm, and the learning rate after it.

        Raises:
            NonFiniteError: NaN or infinity in a loss or gradient; the step was not taken.
            TrainingError: One demonstration, or the optimizer's state, does not fit into memory.
        """
        self._count += 1
        accumulate = partial(accumulate_gradient, self.model, minibatch, step=self._count)
        loss, metrics = self._steps.take(accumulate, [demonstration.sequence for demonstration in minibatch])
        return {"sft/loss": loss, **metrics}

    def mean_loss(self, demonstrations: Sequence[Demonstration]) -> float:
        """Return the mean negative log-likelihood per assistant token, in nats."""
        return mean_loss(self.model, demonstrations, self._steps.tokens)

    def shuffle_gap(self, demonstrations: Sequence[Demonstration], *, seed: int) -> ShuffleGap:
        """Return the rise in loss when answers of different prompts are exchanged."""
        return measure_shuffle_gap(self.model, demonstrations, tokens_per_microbatch=self._steps.tokens, seed=seed)

    def save_model(self, start: Path, folder: Path, *, like_start: bool = False) -> None:
        """Write the model as a checkpoint with the tokenizer of ``start``, its initial checkpoint."""
        save_trained(self.model, start, folder, like_start=like_start)


def run_sft_steps(
    learner: SftLearner,
    train: Sequence[Demonstration],
    held_out: Sequence[Demonstration],
    config: SftConfig,
    *,
    seed: int,
    report: Report,
) -> None:
    """Take ``num_steps`` steps of ``learner``; calls ``report(step, metrics)`` after each.

    Raises:
        DataError: There are no demonstrations.
        NonFiniteError: NaN or infinity in a loss or gradient; that step was not taken.
        TrainingError: One demonstration, or the optimizer's state, does not fit into memory; or ranks were lost.
    """
    if not train:
        raise DataError("there are no demonstrations to train on", fix="see the report of prepare_demonstrations")
    for step, minibatch in enumerate(minibatches(train, config, seed=seed), start=1):
        metrics = dict(learner.step(minibatch))
        if step == config.num_steps or (config.eval_every and step % config.eval_every == 0):
            metrics["sft/eval_loss"] = learner.mean_loss(held_out)
        report(step, metrics)
        advance("steps", step, config.num_steps)


def accumulate_gradient(
    model: PreTrainedModel, minibatch: Sequence[Demonstration], tokens_per_microbatch: int, scale: float, *, step: int
) -> float:
    """Add the gradient of the minibatch's mean loss times ``scale``; return that loss, in nats per token.

    Raises:
        NonFiniteError: NaN or infinity in the loss; no step was taken.
    """
    ranks, sequences = ranks_of(model), [demonstration.sequence for demonstration in minibatch]
    mine = rank_indices(model, sequences, tokens_per_microbatch=tokens_per_microbatch)
    num_tokens = sum(demonstration.num_trained for demonstration in minibatch)
    total = 0.0
    for batch in pack_trained(model, [minibatch[i] for i in mine], tokens_per_microbatch=tokens_per_microbatch):
        loss = run_forward(model, partial(_loss, model, batch.to(device_of(model)), num_tokens))
        add_gradient(loss, scale=scale, name=f"the SFT loss of step {step}", ranks=ranks)
        total += float(loss.detach())
    ranks.sum_gradients(parameter for parameter in model.parameters() if parameter.requires_grad)
    return sum(ranks.gather(total))


def _loss(model: PreTrainedModel, batch: PackedBatch, num_tokens: int) -> torch.Tensor:
    states = completion_states(model, batch)
    return completion_loss(model, states, batch, lambda _, p, __: -p.sum() / num_tokens, by_token=True)


def pack_trained(
    model: PreTrainedModel, demonstrations: Sequence[Demonstration], *, tokens_per_microbatch: int
) -> Iterator[PackedBatch]:
    """Yield micro-batches that predict only trained tokens; other tokens are context."""
    masks = [torch.tensor(demonstration.loss_mask) for demonstration in demonstrations]
    offsets = torch.tensor([0, *map(len, masks)]).cumsum(0)
    trained = torch.cat([torch.empty(0, dtype=torch.bool), *masks])
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
    """Yield ``num_steps`` minibatches, reshuffling every epoch."""
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
    """Return the mean negative log-likelihood per assistant token, in nats."""
    sequences = [demonstration.sequence for demonstration in demonstrations]
    mine = rank_indices(model, sequences, tokens_per_microbatch=tokens_per_microbatch)
    batches = pack_trained(model, [demonstrations[i] for i in mine], tokens_per_microbatch=tokens_per_microbatch)
    logprobs = [run_forward(model, partial(_scores, model, batch.to(device_of(model)))).cpu() for batch in batches]
    own = torch.cat([torch.empty(0), *logprobs])
    return -float(torch.cat(ranks_of(model).gather(own)).mean())


def _scores(model: PreTrainedModel, batch: PackedBatch) -> torch.Tensor:
    return state_scores(model, completion_states(model, batch), batch)
