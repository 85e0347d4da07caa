"""Direct preference optimization: train a policy on preferences as an implicit reward model (Rafailov et al. 2023).

The implicit reward of a completion is ``beta`` times its log-probability minus that of the reference policy. The loss
is that of a reward model with these rewards. The reference policy is the policy's start: its log-probabilities are
computed once before training, so that no second model is in memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlcore.algorithms.preference import bradley_terry, implicit_rewards, smoothed
from rlcore.config import DpoConfig
from rlcore.errors import DataError
from rlcore.hardware.memory import filled_on, positions_on
from rlcore.hardware.out_of_memory import retry_unless_distributed
from rlcore.hardware.sharded import device_of, full_state_dict, ranks_of, run_forward
from rlcore.models.batching import pack_for, rank_indices
from rlcore.models.integrity import verify_saved
from rlcore.models.loading import save_model
from rlcore.models.logprob_check import check_model
from rlcore.models.lora import AdaptedModel, MergedState, add_lora
from rlcore.models.policy import completion_loss, completion_states, score_sequences, state_scores
from rlcore.models.runtime import Runtime
from rlcore.progress import advance
from rlcore.seeding import shuffled
from rlcore.text.packing import PackedBatch, TokenSequence
from rlcore.text.tokenization import ChatTokenizer
from rlcore.training.loss_scale import LossScale
from rlcore.training.optim import add_gradient, guarded_step, make_optimizer, make_scheduler
from rlcore.training.preferences import (
    PreferenceSet,
    TokenPair,
    different_sequences,
    microbatches,
    preference_sets,
    side_indices,
)

if TYPE_CHECKING:
    from jaxtyping import Float64

Report = Callable[[int, Mapping[str, float]], None]
Reference = Mapping[TokenSequence, float]
"""Log-probability of each completion under the reference policy, in nats."""


class DpoLearner:
    """DPO of a model of this process, which may be one of several ranks."""

    def __init__(self, model: Any, config: DpoConfig) -> None:
        self.model, self.ranks = model, ranks_of(model)
        self._config, self._tokens = config, config.tokens_per_microbatch
        self._loss_scale = LossScale.of(model)

    def begin(self, sequences: Sequence[TokenSequence], *, num_steps: int) -> None:
        """Prepare ``num_steps`` steps; the current log-probabilities of ``sequences`` become the reference."""
        self._reference = whole_logprobs(self.model, sequences, tokens_per_microbatch=self._tokens)
        self._optimizer = make_optimizer([(self.model, self._config.learning_rate)], self._config.optim)
        self._scheduler = make_scheduler(self._optimizer, self._config.optim, num_steps=num_steps)

    def step(self, sets: Sequence[PreferenceSet]) -> dict[str, float]:
        """Take one step; return its loss, both sides' rewards before it, the gradient norm and the next learning rate.

        Raises:
            NonFiniteError: NaN or infinity in a loss or gradient; the step was not taken.
            TrainingError: One completion, or the optimizer's state, does not fit into memory.
        """
        (found, self._tokens), norm, self._loss_scale = guarded_step(
            partial(_fitted_gradient, self.model, sets, self._reference, self._config, self._tokens),
            self._optimizer,
            self._scheduler,
            max_grad_norm=self._config.optim.max_grad_norm,
            scale=self._loss_scale,
        )
        return {**found, "gradient_norm": norm, "learning_rate": float(self._scheduler.get_last_lr()[0])}

    def rewards(self, sequences: Sequence[TokenSequence]) -> Float64[Tensor, "sequences"]:
        """Return implicit rewards of completions passed to :meth:`begin`, float64 [S], without gradient."""
        now = whole_logprobs(self.model, sequences, tokens_per_microbatch=self._config.tokens_per_microbatch)
        both = [[each[one] for one in sequences] for each in (now, self._reference)]
        policy, ref = torch.tensor(both, dtype=torch.float64)
        return implicit_rewards(policy, ref, beta=self._config.beta)

    def save_model(self, start: Path, folder: Path, *, like_start: bool = False) -> None:
        """Write the policy as a checkpoint with the tokenizer of ``start``, its initial checkpoint."""
        state = full_state_dict(self.model)
        self.ranks.broadcast_object(partial(save_model, self.model, start, folder, like_start=like_start, state=state))
        own = MergedState(self.model) if isinstance(self.model, AdaptedModel) else self.model.state_dict()
        self.ranks.broadcast_object(partial(verify_saved, own if state is None else state, folder))


def dpo_policy(start: Path, config: DpoConfig, runtime: Runtime, *, seed: int) -> Any:
    """Load the policy to train: all weights of a checkpoint, or an adapter on its frozen weights.

    Raises:
        ModelError: The checkpoint cannot be trained.
    """
    model = runtime.load_base(start) if config.lora.rank else runtime.load_trainable(start)
    check_model(model, ChatTokenizer.load(start))
    return add_lora(model, config.lora, "policy", seed=seed) if config.lora.rank else model


def run_dpo_steps(
    learner: DpoLearner,
    pairs: Sequence[TokenPair],
    held_out: Sequence[TokenPair],
    config: DpoConfig,
    *,
    seed: int,
    report: Report,
) -> Float64[Tensor, "pairs"]:
    """Train ``learner`` on pairs for ``num_epochs``; return the margins of ``held_out``, float64 [P].

    The margin of a pair is the implicit reward of its chosen side minus that of its rejected side. Calls
    ``report(step, metrics)`` after each step.

    Raises:
        DataError: There are no pairs.
        NonFiniteError: NaN or infinity in a loss or gradient; that step was not taken.
        TrainingError: One completion, or the optimizer's state, does not fit into memory; or ranks were lost.
    """
    if not pairs:
        raise DataError("there are no preference pairs to train on", fix="see the report of the dataset")
    sets, margins = preference_sets(pairs), torch.zeros(0, dtype=torch.float64)
    num_steps = config.num_epochs * -(-len(sets) // config.batch_size)
    learner.begin(different_sequences([*pairs, *held_out]), num_steps=num_steps)
    for step, minibatch in enumerate(_minibatches(sets, config, seed=seed), start=1):
        metrics = learner.step(minibatch)
        if step == num_steps or (config.eval_every and step % config.eval_every == 0):
            margins = pair_margins(learner, held_out)
            metrics |= held_out_metrics(margins)
        report(step, metrics)
        advance("steps", step, num_steps)
    return margins


def whole_logprobs(model: Any, sequences: Sequence[TokenSequence], *, tokens_per_microbatch: int) -> Reference:
    """Return the log-probability of each whole completion, without gradient, splitting the work among ranks."""
    mine = rank_indices(model, sequences, tokens_per_microbatch=tokens_per_microbatch)
    own = [sequences[number] for number in mine]
    scored = score_sequences(model, own, tokens_per_microbatch=tokens_per_microbatch)
    found = ranks_of(model).collect(mine, [float(logprobs.double().sum()) for logprobs in scored])
    return dict(zip(sequences, found, strict=True))


def pair_margins(learner: DpoLearner, pairs: Sequence[TokenPair]) -> Float64[Tensor, "pairs"]:
    """Return implicit reward of the chosen minus the rejected side, float64 [P], without gradient."""
    sequences = different_sequences(pairs)
    rewards = dict(zip(sequences, learner.rewards(sequences).tolist(), strict=True))
    margins = [rewards[chosen] - rewards[rejected] for chosen, rejected in (pair.sides for pair in pairs)]
    return torch.tensor(margins, dtype=torch.float64)


def held_out_metrics(margins: Float64[Tensor, "pairs"]) -> dict[str, float]:
    """Return metrics of the margins [P] of held-out pairs, equally weighted; a tie counts one half."""
    return {
        "dpo/eval_loss": -float(torch.nn.functional.logsigmoid(margins).mean()),
        "dpo/eval_accuracy": float(torch.heaviside(margins, margins.new_tensor(0.5)).mean()),
        "dpo/eval_margin": float(margins.mean()),
    }


def _minibatches(sets: Sequence[PreferenceSet], config: DpoConfig, *, seed: int) -> Iterator[list[PreferenceSet]]:
    """Yield the minibatches of all epochs, reshuffling every epoch."""
    for epoch in range(config.num_epochs):
        order = shuffled(len(sets), seed, "dpo", epoch)
        for start in range(0, len(order), config.batch_size):
            yield [sets[index] for index in order[start : start + config.batch_size]]


def _fitted_gradient(
    model: Any,
    sets: Sequence[PreferenceSet],
    reference: Reference,
    config: DpoConfig,
    tokens: int,
    scale: float,
) -> tuple[Mapping[str, float], int]:
    """Return the metrics of :func:`accumulate_gradient`, and the tokens per micro-batch that fit into memory."""

    def attempt(tokens_per_microbatch: int) -> Mapping[str, float]:
        model.zero_grad(set_to_none=True)
        smaller = dataclasses.replace(config, tokens_per_microbatch=tokens_per_microbatch)
        return accumulate_gradient(model, sets, reference, smaller, scale=scale)

    sequences = [sequence for each in sets for sequence in each.sequences()]
    setting = "dpo.tokens_per_microbatch"
    return retry_unless_distributed(model, attempt, tokens, sequences=sequences, setting=setting)


def accumulate_gradient(
    model: Any, sets: Sequence[PreferenceSet], reference: Reference, config: DpoConfig, *, scale: float
) -> dict[str, float]:
    """Add the gradient of a minibatch's loss times ``scale``; return the loss and the rewards of both sides.

    Every set counts once. Its completions stay together and share the row of their prompt. Ranks split the work.

    Raises:
        NonFiniteError: NaN or infinity in the loss; no step was taken.
    """
    ranks = ranks_of(model)
    total_weight = sum(one.weight for each in sets for one in each.comparisons)
    loss_sum, sides = 0.0, list[Tensor]()
    device, budget = device_of(model).type, config.tokens_per_microbatch
    for group in microbatches(sets, positions_on(device, budget), ranks, filled=filled_on(device, budget)):
        pull, loss, found = run_forward(model, partial(_pull, model, group, reference, total_weight, config))
        add_gradient(pull, scale=scale, name="the DPO loss", ranks=ranks)
        loss_sum += float(loss)
        sides.append(found.cpu())
    ranks.sum_gradients(parameter for parameter in model.parameters() if parameter.requires_grad)
    losses, parts = zip(*ranks.gather((loss_sum, torch.cat(sides, dim=1))), strict=True)
    chosen, rejected = torch.cat(parts, dim=1)
    return {
        "dpo/loss": sum(losses),
        "dpo/accuracy": float((chosen > rejected).double().mean()),
        "dpo/chosen": float(chosen.mean()),
        "dpo/rejected": float(rejected.mean()),
        "dpo/margin": float((chosen - rejected).mean()),
    }


def _pull(
    model: Any, group: Sequence[PreferenceSet], reference: Reference, total_weight: float, config: DpoConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """Return for a micro-batch: a scalar with the gradient of its loss, the loss, and the rewards of both sides [2, P].

    The slope of the loss by each completion's log-probability is known after the forward pass; the remaining backward
    pass is linear.
    """
    sequences = [sequence for each in group for sequence in each.sequences()]
    packed = pack_for(model, sequences, tokens_per_microbatch=config.tokens_per_microbatch)
    batches = [batch.to(device_of(model)) for batch in packed]
    states = [completion_states(model, batch) for batch in batches]
    policy = _sums(model, sequences, batches, states).requires_grad_()
    rewards = implicit_rewards(policy, policy.new_tensor([reference[one] for one in sequences]), beta=config.beta)
    loss, found = _loss(group, rewards, total_weight, config)
    (slopes,) = torch.autograd.grad(loss, policy)
    pulls = [
        completion_loss(model, state, batch, partial(_pulled, slopes, batch), by_token=True)
        for batch, state in zip(batches, states, strict=True)
    ]
    return torch.stack(pulls).sum(), loss.detach(), found


def _sums(
    model: Any, sequences: Sequence[TokenSequence], batches: Sequence[PackedBatch], states: Sequence[Tensor]
) -> Tensor:
    """Return the log-probability of each completion, float64 [S], without gradient, summed in a fixed order."""
    sums = torch.zeros(len(sequences), dtype=torch.float64, device=device_of(model))
    for batch, state in zip(batches, states, strict=True):
        lengths = [len(sequences[number].completion_ids) for number in batch.sequences.tolist()]
        if not lengths:  # this rank has no work left
            continue
        parts = torch.split(state_scores(model, state, batch).double(), lengths)
        sums[batch.sequences] = torch.stack([part.sum() for part in parts])
    return sums


def _loss(
    sets: Sequence[PreferenceSet], rewards: Tensor, total_weight: float, config: DpoConfig
) -> tuple[Tensor, Tensor]:
    """Return the contribution of some sets to a minibatch's loss, and the rewards of both sides [2, P]."""
    comparisons = [one for each in sets for one in each.comparisons]
    better, worse = side_indices(sets)
    chosen, rejected = rewards[better], rewards[worse]
    loss = bradley_terry(
        chosen,
        rejected,
        margins=rewards.new_tensor([one.margin for one in comparisons]),
        probabilities=smoothed(rewards.new_tensor([one.probability for one in comparisons]), config.label_smoothing),
        weights=rewards.new_tensor([one.weight / total_weight for one in comparisons]),
    )
    return loss, torch.stack([chosen, rejected]).detach()


def _pulled(slopes: Tensor, batch: PackedBatch, chunk: slice, logprobs: Tensor, entropy: Tensor) -> Tensor:
    """Return the sum of some tokens' log-probabilities, each times the slope of its completion."""
    return (slopes[batch.sequence_index[chunk]].to(logprobs.dtype) * logprobs).sum()
