"""Direct preference optimization: a policy learns from preferences as if it were a reward model (Rafailov et al. 2023).

The implicit reward of a completion is ``beta`` times its log-probability above that of the reference, and the loss is
the reward model's of such rewards. The reference is the policy as it starts: what it says of each completion is
computed once, before anything learns, so that no second model is in memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlcore.algorithms.preference import bradley_terry, implicit_rewards, smoothed
from rlcore.config import DpoConfig
from rlcore.errors import DataError
from rlcore.models.batches import pack_for
from rlcore.models.policy import completion_loss, completion_states, score_sequences, state_scores
from rlcore.out_of_memory import fit, longest_of
from rlcore.packing import PackedBatch, TokenSequence
from rlcore.seeding import shuffled
from rlcore.training.loss_scale import LossScale
from rlcore.training.optim import add_gradient, guarded_step, make_optimizer, make_scheduler
from rlcore.training.preferences import (
    PreferenceSet,
    TokenPair,
    different_sequences,
    microbatches,
    places_of,
    preference_sets,
)

if TYPE_CHECKING:
    from jaxtyping import Float64

Report = Callable[[int, Mapping[str, float]], None]
Reference = Mapping[TokenSequence, float]
"""The log-probability of each completion under the reference, in nats."""


def train_dpo(
    model: Any,
    pairs: Sequence[TokenPair],
    held_out: Sequence[TokenPair],
    config: DpoConfig,
    *,
    seed: int,
    report: Report,
) -> Float64[Tensor, "pairs"]:
    """Train ``model``, a policy or an adapted one, in place for ``num_epochs``; returns the margins of ``held_out``.

    ``report(step, metrics)`` is called after each step. The margin of a pair is the implicit reward of its chosen side
    less that of the other one, float64 [P].

    Raises:
        DataError: there is nothing to train on.
        NonFiniteError: NaN or infinity in a loss or gradient; that step was not taken.
        TrainingError: one completion, or the optimizer's state, does not fit into memory.
    """
    if not pairs:
        raise DataError("there are no preference pairs to train on", fix="look at the report of the data set")
    sets, tokens = preference_sets(pairs), config.tokens_per_microbatch
    reference = whole_logprobs(model, different_sequences([*pairs, *held_out]), tokens_per_microbatch=tokens)
    num_steps = config.num_epochs * -(-len(sets) // config.batch_size)
    optimizer = make_optimizer([(model, config.learning_rate)], config.optim)
    scheduler = make_scheduler(optimizer, config.optim, num_steps=num_steps)
    loss_scale, margins = LossScale.of(model), torch.zeros(0, dtype=torch.float64)
    for step, minibatch in enumerate(_minibatches(sets, config, seed=seed), start=1):
        accumulate = partial(_fitted_gradient, model, minibatch, reference, config, tokens)
        (found, tokens), norm, loss_scale = guarded_step(
            accumulate, optimizer, scheduler, max_grad_norm=config.optim.max_grad_norm, scale=loss_scale
        )
        metrics = {**found, "gradient_norm": norm, "learning_rate": float(scheduler.get_last_lr()[0])}
        if step == num_steps or (config.eval_every and step % config.eval_every == 0):
            margins = pair_margins(model, held_out, reference, config)
            metrics |= held_out_metrics(margins)
        report(step, metrics)
    return margins


def whole_logprobs(model: Any, sequences: Sequence[TokenSequence], *, tokens_per_microbatch: int) -> Reference:
    """The log-probability of each completion as a whole, without gradient."""
    scored = score_sequences(model, sequences, tokens_per_microbatch=tokens_per_microbatch)
    return {sequence: float(logprobs.double().sum()) for sequence, logprobs in zip(sequences, scored, strict=True)}


def pair_margins(
    model: Any, pairs: Sequence[TokenPair], reference: Reference, config: DpoConfig
) -> Float64[Tensor, "pairs"]:
    """The implicit reward of the chosen side less that of the rejected one, float64 [P]; without gradient."""
    sequences = different_sequences(pairs)
    now = whole_logprobs(model, sequences, tokens_per_microbatch=config.tokens_per_microbatch)
    policy, ref = (torch.tensor([each[one] for one in sequences], dtype=torch.float64) for each in (now, reference))
    rewards = dict(zip(sequences, implicit_rewards(policy, ref, beta=config.beta).tolist(), strict=True))
    sides = [pair.sides for pair in pairs]
    margins = [rewards[chosen] - rewards[rejected] for chosen, rejected in sides]
    return torch.tensor(margins, dtype=torch.float64)


def held_out_metrics(margins: Float64[Tensor, "pairs"]) -> dict[str, float]:
    """What the margins [P] of held-out pairs say, each pair counting once; a tie is half right."""
    return {
        "dpo/eval_loss": -float(torch.nn.functional.logsigmoid(margins).mean()),
        "dpo/eval_accuracy": float(torch.heaviside(margins, margins.new_tensor(0.5)).mean()),
        "dpo/eval_margin": float(margins.mean()),
    }


def _minibatches(sets: Sequence[PreferenceSet], config: DpoConfig, *, seed: int) -> Iterator[list[PreferenceSet]]:
    """Those of every epoch, each epoch in an order of its own."""
    for epoch in range(config.num_epochs):
        order = shuffled(len(sets), seed, "dpo", epoch)
        for start in range(0, len(order), config.batch_size):
            yield [sets[place] for place in order[start : start + config.batch_size]]


def _fitted_gradient(
    model: Any,
    sets: Sequence[PreferenceSet],
    reference: Reference,
    config: DpoConfig,
    tokens: int,
    scale: float,
) -> tuple[Mapping[str, float], int]:
    """The metrics of :func:`accumulate_gradient`, and the tokens of a micro-batch with which it fits into memory."""

    def attempt(tokens_per_microbatch: int) -> Mapping[str, float]:
        model.zero_grad(set_to_none=True)
        smaller = dataclasses.replace(config, tokens_per_microbatch=tokens_per_microbatch)
        return accumulate_gradient(model, sets, reference, smaller, scale=scale)

    longest = longest_of([sequence for each in sets for sequence in each.sequences()])
    return fit(attempt, tokens, longest=longest, setting="dpo.tokens_per_microbatch")


def accumulate_gradient(
    model: Any, sets: Sequence[PreferenceSet], reference: Reference, config: DpoConfig, *, scale: float
) -> dict[str, float]:
    """Add the gradient of a minibatch's loss times ``scale``; returns the loss, and the rewards of both sides.

    Every set counts once. Its completions stay together, and share the row of their prompt.

    Raises:
        NonFiniteError: NaN or infinity in the loss; no step was taken.
    """
    total_weight = sum(one.weight for each in sets for one in each.comparisons)
    loss_sum, sides = 0.0, list[Tensor]()
    for group in microbatches(sets, config.tokens_per_microbatch):
        sequences = [sequence for each in group for sequence in each.sequences()]
        batches = [
            batch.to(model.device)
            for batch in pack_for(model, sequences, tokens_per_microbatch=config.tokens_per_microbatch)
        ]
        states = [completion_states(model, batch) for batch in batches]
        policy = _sums(model, sequences, batches, states).requires_grad_()
        ref = policy.new_tensor([reference[sequence] for sequence in sequences])
        loss, found = _loss(group, implicit_rewards(policy, ref, beta=config.beta), total_weight, config)
        # What each completion's log-probability pulls at is known now: the rest of the way back is linear.
        (slopes,) = torch.autograd.grad(loss, policy)
        for batch, state in zip(batches, states, strict=True):
            linear = completion_loss(model, state, batch, partial(_pulled, slopes, batch), by_token=True)
            add_gradient(linear, scale=scale, name="the DPO loss")
        loss_sum += float(loss.detach())
        sides.append(found)
    chosen, rejected = torch.cat(sides, dim=1)
    return {
        "dpo/loss": loss_sum,
        "dpo/accuracy": float((chosen > rejected).double().mean()),
        "dpo/chosen": float(chosen.mean()),
        "dpo/rejected": float(rejected.mean()),
        "dpo/margin": float((chosen - rejected).mean()),
    }


def _sums(
    model: Any, sequences: Sequence[TokenSequence], batches: Sequence[PackedBatch], states: Sequence[Tensor]
) -> Tensor:
    """The log-probability of each completion, float64 [S], without gradient; in a fixed order, so that bits repeat."""
    sums = torch.zeros(len(sequences), dtype=torch.float64, device=model.device)
    for batch, state in zip(batches, states, strict=True):
        lengths = [len(sequences[number].completion_ids) for number in batch.sequences.tolist()]
        parts = torch.split(state_scores(model, state, batch).double(), lengths)
        sums[batch.sequences] = torch.stack([part.sum() for part in parts])
    return sums


def _loss(
    sets: Sequence[PreferenceSet], rewards: Tensor, total_weight: float, config: DpoConfig
) -> tuple[Tensor, Tensor]:
    """The share of some sets in a minibatch's loss, and the rewards of both sides [2, P]."""
    judged = [one for each in sets for one in each.comparisons]
    better, worse = places_of(sets)
    chosen, rejected = rewards[better], rewards[worse]
    loss = bradley_terry(
        chosen,
        rejected,
        margins=rewards.new_tensor([one.margin for one in judged]),
        probabilities=smoothed(rewards.new_tensor([one.probability for one in judged]), config.label_smoothing),
        weights=rewards.new_tensor([one.weight / total_weight for one in judged]),
    )
    return loss, torch.stack([chosen, rejected]).detach()


def _pulled(slopes: Tensor, batch: PackedBatch, chunk: slice, logprobs: Tensor, entropy: Tensor) -> Tensor:
    """Log-probabilities of some tokens of a batch, each times the slope of its completion."""
    return (slopes[batch.sequence_index[chunk]].to(logprobs.dtype) * logprobs).sum()
