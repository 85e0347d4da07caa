"""Direct preference optimization: train a policy on preferences as an implicit reward model (Rafailov et al. 2023).

The loss is that of a reward model with :func:`~rlcore.algorithms.preference.implicit_rewards`. The reference policy is
the policy's start: its log-probabilities are computed once before training, so no second model is in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlcore.algorithms.preference import implicit_rewards
from rlcore.config import DpoConfig, PreferenceLossConfig
from rlcore.errors import DataError
from rlcore.hardware.sharded import device_of, ranks_of
from rlcore.models.architectures import pack_for, rank_indices
from rlcore.models.logprob_check import check_model
from rlcore.models.lora import add_lora
from rlcore.models.policy import completion_loss, completion_states, score_sequences, state_scores
from rlcore.models.runtime import Runtime, save_trained
from rlcore.progress import advance
from rlcore.text.packing import PackedBatch, TokenSequence
from rlcore.text.tokenization import ChatTokenizer
from rlcore.training.optim import Report, Stepper
from rlcore.training.preferences import (
    PreferenceSet,
    TokenPair,
    comparison_loss,
    different_sequences,
    preference_sets,
    shuffled_sets,
    take_step,
)

if TYPE_CHECKING:
    from jaxtyping import Float64

Reference = Mapping[TokenSequence, float]
"""Log-probability of each completion under the reference policy, in nats."""


class DpoLearner:
    """DPO of a model of this process, which may be one of several ranks."""

    def __init__(self, model: Any, config: DpoConfig) -> None:
        self.model, self._config = model, config

    def begin(self, sequences: Sequence[TokenSequence], *, num_steps: int) -> None:
        """Prepare ``num_steps`` steps; the current log-probabilities of ``sequences`` become the reference."""
        config = self._config
        tokens, setting = config.tokens_per_microbatch, "dpo.tokens_per_microbatch"
        self._reference = whole_logprobs(self.model, sequences, tokens_per_microbatch=tokens)
        groups = [(self.model, config.learning_rate)]
        self._steps = Stepper(self.model, groups, config.optim, num_steps=num_steps, tokens=tokens, setting=setting)

    def step(self, sets: Sequence[PreferenceSet]) -> dict[str, float]:
        """Take one step; return its loss, both sides' rewards before it, the gradient norm and the next learning rate.

        Raises:
            NonFiniteError: NaN or infinity in a loss or gradient; the step was not taken.
            TrainingError: One completion, or the optimizer's state, does not fit into memory.
        """
        pull = partial(_pull, self.model, self._reference, self._config)
        loss, (chosen, rejected), metrics = take_step(self._steps, self.model, sets, pull, name="the DPO loss")
        return {
            "dpo/loss": loss,
            "dpo/accuracy": float((chosen > rejected).double().mean()),
            "dpo/chosen": float(chosen.mean()),
            "dpo/rejected": float(rejected.mean()),
            "dpo/margin": float((chosen - rejected).mean()),
            **metrics,
        }

    def rewards(self, sequences: Sequence[TokenSequence]) -> Float64[Tensor, "sequences"]:
        """Return implicit rewards of completions passed to :meth:`begin`, float64 [S], without gradient."""
        now = whole_logprobs(self.model, sequences, tokens_per_microbatch=self._config.tokens_per_microbatch)
        both = [[each[one] for one in sequences] for each in (now, self._reference)]
        policy, ref = torch.tensor(both, dtype=torch.float64)
        return implicit_rewards(policy, ref, beta=self._config.beta)

    def save_model(self, start: Path, folder: Path, *, like_start: bool = False) -> None:
        """Write the policy as a checkpoint with the tokenizer of ``start``, its initial checkpoint."""
        save_trained(self.model, start, folder, like_start=like_start)


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

    Margins are :func:`pair_margins`. Calls ``report(step, metrics)`` after each step.

    Raises:
        DataError: There are no pairs.
        NonFiniteError: NaN or infinity in a loss or gradient; that step was not taken.
        TrainingError: One completion, or the optimizer's state, does not fit into memory; or ranks were lost.
    """
    if not pairs:
        raise DataError("there are no preference pairs to train on", fix="see the report of the dataset")
    sets, margins = preference_sets(pairs), torch.zeros(0, dtype=torch.float64)
    batches = shuffled_sets(sets, num_epochs=config.num_epochs, batch_size=config.batch_size, seed=seed, name="dpo")
    num_steps = len(batches)
    learner.begin(different_sequences([*pairs, *held_out]), num_steps=num_steps)
    for step, minibatch in enumerate(batches, start=1):
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


def _pull(
    model: Any, reference: Reference, config: DpoConfig, tokens: int, group: Sequence[PreferenceSet], weight: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return for a micro-batch: a scalar with the gradient of its loss, the loss, and the rewards of both sides [2, P].

    The slope of the loss by each completion's log-probability is known after the forward pass; the remaining backward
    pass is linear.
    """
    sequences = [sequence for each in group for sequence in each.sequences]
    packed = pack_for(model, sequences, tokens_per_microbatch=tokens)
    batches = [batch.to(device_of(model)) for batch in packed]
    states = [completion_states(model, batch) for batch in batches]
    policy = _sums(model, sequences, batches, states).requires_grad_()
    rewards = implicit_rewards(policy, policy.new_tensor([reference[one] for one in sequences]), beta=config.beta)
    smoothing = PreferenceLossConfig(label_smoothing=config.label_smoothing)
    loss, found = comparison_loss(group, rewards, weight, smoothing)
    (slopes,) = torch.autograd.grad(loss, policy)
    pulls = [
        completion_loss(model, state, batch, partial(_pulled, slopes, batch), by_token=True)
        for batch, state in zip(batches, states, strict=True)
    ]
    return torch.stack(pulls).sum(), loss, found


def _sums(
    model: Any, sequences: Sequence[TokenSequence], batches: Sequence[PackedBatch], states: Sequence[Tensor]
) -> Tensor:
    """Return the log-probability of each completion, float64 [S], summed in a fixed order."""
    sums = torch.zeros(len(sequences), dtype=torch.float64, device=device_of(model))
    for batch, state in zip(batches, states, strict=True):
        lengths = [len(sequences[number].completion_ids) for number in batch.sequences.tolist()]
        if not lengths:  # this rank has no work left
            continue
        parts = torch.split(state_scores(model, state, batch).double(), lengths)
        sums[batch.sequences] = torch.stack([part.sum() for part in parts])
    return sums


def _pulled(slopes: Tensor, batch: PackedBatch, chunk: slice, logprobs: Tensor, entropy: Tensor) -> Tensor:
    return (slopes[batch.sequence_index[chunk]].to(logprobs.dtype) * logprobs).sum()
