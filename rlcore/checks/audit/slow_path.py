"""Slow path of the audit: plain forward passes of single sequences, and a loss by formula with its gradient.

The same samples go through the code of an update (:meth:`rlcore.training.learner.Learner.trial`) twice, and both times
the formula must agree: unchanged, in micro-batches of one sequence; and with random advantages, ratios, values and
reference log-probabilities, so that ratios are not 1, bounds are active, and every term counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from rlcore.checks.audit.drawn_numbers import with_drawn_numbers
from rlcore.checks.audit.features import Features, rollout_features
from rlcore.checks.audit.loss_formula import Tokens, is_marginal, policy_loss, policy_slack, value_loss, value_slack
from rlcore.checks.audit.passes import picked, plain_logprobs, plain_values
from rlcore.checks.audit.reference_impl import AlgorithmSpec, row_of, token_weights
from rlcore.distributed.ranks import is_shard
from rlcore.hardware.precision import compute_dtype
from rlcore.seeding import derive_seed, shuffled
from rlcore.text.packing import TokenSequence
from rlcore.training.learner import Learner
from rlcore.types import Rollout, TrainingSample

MAX_TOKENS = 256  # audited tokens per completion, because their logits [tokens, vocabulary] are in memory
_MAX_NUMBERS = 1 << 22  # entries of all tensors whose gradients are compared
_TRIES = 8  # draws of random numbers, until none is at a bound
_FIELDS = ("loss_mask", "sampler_logprobs", "old_logprobs", "ref_logprobs", "advantages", "values", "returns")


@dataclass(frozen=True, kw_only=True, slots=True)
class Gradient:
    """Gradient norms of a tensor: of the update, of the formula, of their difference, and the sum over samples."""

    actual: float
    expected: float
    distance: float
    norm_sum: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """A step that was computed by the update's code and by formula, and not taken.

    Attributes:
        losses: Loss of the update, loss by formula, and rounding tolerance, by name.
        gradients: Gradient norms, by tensor name.
    """

    losses: Mapping[str, tuple[float, float, float]]
    gradients: Mapping[str, Gradient]

    @property
    def is_finite(self) -> bool:
        """True if no gradient overflowed."""
        return all(math.isfinite(each.actual) and math.isfinite(each.distance) for each in self.gradients.values())


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SlowPathResult:
    """Results of the slow path for S samples and R rollouts.

    ``positions``: audited tokens of each sample; ``logprobs``, ``ref_logprobs``, ``values``: at these positions, empty
    without such a model; ``next_values``: the critic's value beyond each end. ``sampled_positions``, ``features``:
    inputs of the sampling test, per rollout. ``trial``: step on the unchanged samples; ``random_trial``: on random
    numbers, None if these were at bounds.
    """

    positions: tuple[tuple[int, ...], ...]
    logprobs: tuple[Tensor, ...]
    ref_logprobs: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    next_values: tuple[float, ...]
    sampled_positions: tuple[tuple[int, ...], ...]
    features: tuple[Features, ...]
    trial: Trial | None
    random_trial: Trial | None


@torch.no_grad()
def run_slow_path(
    learner: Learner,
    reference: Any,
    samples: Sequence[TrainingSample],
    rollouts: Sequence[Rollout] = (),
    *,
    eos_ids: Sequence[int],
    seed: int,
) -> SlowPathResult:
    """Audit samples before the update, and ``rollouts`` for the sampling test. Weights and gradients stay unchanged."""
    temperature, critic = learner.config.sampling.temperature, learner.critic
    sequences = [_sequence(sample) for sample in samples]
    positions = [_choose(sample.loss_mask.tolist(), seed, number) for number, sample in enumerate(samples)]
    pairs = list(zip(sequences, positions, strict=True))

    def score(model: Any) -> tuple[Tensor, ...]:
        found = [picked(plain_logprobs(model, *each, temperature), *each) for each in pairs]
        return tuple(each.float().cpu() for each in found)

    values, next_values = list[Tensor](), list[float]()
    for sequence, own in pairs if critic is not None else ():
        found = plain_values(critic, sequence, [*own, len(sequence.completion_ids)]).float().cpu()  # type: ignore[arg-type]
        values.append(found[:-1])
        next_values.append(float(found[-1]))
    sampled = [(rollout, _choose(rollout.loss_mask, seed, number)) for number, rollout in enumerate(rollouts)]
    row, cut, logprobs = row_of(learner.config), [_cut(sample) for sample in samples], score(learner.policy)
    return SlowPathResult(
        positions=tuple(positions),
        logprobs=logprobs,
        ref_logprobs=score(reference) if reference is not None else (),
        values=tuple(values),
        next_values=tuple(next_values),
        sampled_positions=tuple(chosen for _, chosen in sampled),
        features=rollout_features(
            learner.policy, sampled, eos_ids, temperature=temperature, budget=learner.tokens_per_microbatch
        ),
        trial=_trial(learner, row, cut, seed=seed) if row else None,
        random_trial=_random_trial(learner, row, cut, (positions, logprobs), seed=seed) if row else None,
    )


def _sequence(sample: TrainingSample) -> TokenSequence:
    return TokenSequence(prompt_ids=sample.prompt_ids, completion_ids=sample.completion_ids)


def _choose(mask: Sequence[bool], seed: int, number: int) -> tuple[int, ...]:
    """Return the positions of the policy's tokens, or a random choice if there are more than ``MAX_TOKENS``."""
    own = [index for index, is_own in enumerate(mask) if is_own]
    order = shuffled(len(own), seed, "places", number)[:MAX_TOKENS]
    return tuple(sorted(own[index] for index in order))


def _cut(sample: TrainingSample) -> TrainingSample:
    """Truncate a sample to a length whose logits fit into memory."""
    cut = {name: getattr(sample, name)[:MAX_TOKENS] for name in _FIELDS}
    return replace(sample, completion_ids=sample.completion_ids[:MAX_TOKENS], **cut)


def _random_trial(
    learner: Learner,
    row: AlgorithmSpec,
    samples: Sequence[TrainingSample],
    known: tuple[Sequence[tuple[int, ...]], Sequence[Tensor]],
    *,
    seed: int,
) -> Trial | None:
    """Try a later step on samples with random numbers; ``known``: positions of each sample, and log-probabilities."""
    temperature, dtype = learner.config.sampling.temperature, compute_dtype(learner.policy)
    own = [_own(sample) for sample in samples]
    found = [
        logprobs
        if tuple(mine) == positions  # of a completion that was not truncated
        else picked(plain_logprobs(learner.policy, _sequence(sample), mine, temperature), _sequence(sample), mine)
        for sample, mine, positions, logprobs in zip(samples, own, *known, strict=True)
    ]
    is_smooth = row.surrogate in ("clip", "cispo", "sapo") and learner.config.update.rollout_correction.mode != "mask"
    for number in range(_TRIES):
        at = derive_seed(seed, "numbers", number)
        made = [
            with_drawn_numbers(sample, mine, logprobs, learner.config, row, seed=derive_seed(at, index))
            for index, (sample, mine, logprobs) in enumerate(zip(samples, own, found, strict=True))
        ]
        pieces = zip(made, own, found, strict=True)
        tokens = [_tokens(sample, mine, each, each, moved=True) for sample, mine, each in pieces]
        if not any(is_marginal(row, each, learner.config, dtype) for each in tokens):
            return _trial(learner, row, made, seed=seed, moved=True)
    # Rounding decides on which side of a bound a token is. This changes gradients, but no loss that is continuous.
    return replace(_trial(learner, row, made, seed=seed, moved=True), gradients={}) if is_smooth else None


def _own(sample: TrainingSample) -> list[int]:
    return [index for index, is_own in enumerate(sample.loss_mask.tolist()) if is_own]


def _tokens(sample: TrainingSample, own: Sequence[int], logprobs: Tensor, entropy: Tensor, *, moved: bool) -> Tokens:
    names = ("advantages", "sampler_logprobs", "ref_logprobs", *(["old_logprobs"] if moved else []))
    columns = {name: getattr(sample, name)[list(own)].to(logprobs) for name in names}
    old = columns.pop("old_logprobs", None)
    return Tokens(logprobs=logprobs, entropy=entropy, old=old, **columns)


def _trial(
    learner: Learner, row: AlgorithmSpec, samples: Sequence[TrainingSample], *, seed: int, moved: bool = False
) -> Trial:
    """Compute losses and gradients of a step by the update's code and by formula.

    ``moved``: as in a step after the first. After an overflow of float16 the trial is repeated at a smaller loss scale,
    as in an update. The learner keeps its own scale.
    """
    kept = learner.loss_scale
    try:
        while not (made := _trial_once(learner, row, samples, seed=seed, moved=moved)).is_finite:
            if not learner.loss_scale.can_shrink:
                break
            learner.loss_scale = learner.loss_scale.after_overflow()
        return made
    finally:
        learner.loss_scale = kept


@torch.enable_grad()
def _trial_once(
    learner: Learner, row: AlgorithmSpec, samples: Sequence[TrainingSample], *, seed: int, moved: bool
) -> Trial:
    """Run :func:`_trial` at one loss scale. The first step uses micro-batches of one sequence."""
    chosen = dict(_compared(learner, derive_seed(seed, "tensors", int(moved))))
    longest = max(len(sample.prompt_ids) + len(sample.completion_ids) for sample in samples)
    found = learner.trial(samples, tokens=None if moved else longest, moved=moved)
    scale = learner.loss_scale.value
    theirs = {name: _flat(parameter.grad, parameter) / scale for name, parameter in chosen.items()}
    for module in filter(None, (learner.policy, learner.critic)):
        module.zero_grad(set_to_none=True)
    weights = token_weights([sample.loss_mask.tolist() for sample in samples], learner.config)
    sums, slacks = dict.fromkeys(found, 0.0), dict.fromkeys(found, 0.0)
    ours = {name: torch.zeros_like(each) for name, each in theirs.items()}
    norm_sums = dict.fromkeys(theirs, 0.0)
    for sample, weight in zip(samples, weights, strict=True):
        with torch.set_grad_enabled(bool(chosen)):
            made, learned = _losses_of(learner, row, sample, torch.tensor(weight), found.keys(), moved=moved)
        for name, (loss, slack) in made.items():
            sums[name] += float(loss.detach())
            slacks[name] += float(slack)
        for name, gradient in _gradients(scale * learned, chosen).items():  # scaled against underflow
            ours[name] += gradient / scale
            norm_sums[name] += float(gradient.norm()) / scale
    losses = {name: (found[name], sums[name], slacks[name]) for name in found}
    gradients = {
        name: Gradient(
            actual=float(theirs[name].norm()),
            expected=float(ours[name].norm()),
            distance=float((theirs[name] - ours[name]).norm()),
            norm_sum=norm_sums[name],
        )
        for name in chosen
    }
    return Trial(losses=losses, gradients=gradients)


def _gradients(learned: Tensor, chosen: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    if not chosen or not learned.requires_grad:
        return {}
    made = torch.autograd.grad(learned, list(chosen.values()), allow_unused=True)
    return {name: _flat(each, parameter) for (name, parameter), each in zip(chosen.items(), made, strict=True)}


def _losses_of(
    learner: Learner, row: AlgorithmSpec, sample: TrainingSample, weight: Tensor, names: Any, *, moved: bool
) -> tuple[dict[str, tuple[Tensor, Tensor]], Tensor]:
    """Return each loss of a sample with its tolerance, by name, and the sum that is differentiated."""
    config, made, own = learner.config, dict[str, tuple[Tensor, Tensor]](), _own(sample)
    learned, sequence = torch.zeros(()), _sequence(sample)
    if "loss/policy" in names:
        found = plain_logprobs(learner.policy, sequence, own, config.sampling.temperature)
        coefficient = learner.kl.coefficient if config.kl.apply_to == "loss" else 0.0
        tokens = _tokens(sample, own, picked(found, sequence, own), -(found.exp() * found).sum(-1), moved=moved)
        counts = weight[own].to(found)
        loss = (counts * policy_loss(row, tokens, config, coefficient)).sum()
        with torch.no_grad():
            dtype = compute_dtype(learner.policy)
            slack = (counts * policy_slack(row, tokens, config, coefficient, dtype)).sum()
        made["loss/policy"] = loss, slack
        learned = learned + loss.cpu()
    if "loss/value" in names and learner.critic is not None:
        is_detached = learner.shares_backbone and (config.critic.detach or "loss/policy" not in names)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not is_detached):
            values = plain_values(learner.critic, sequence, own)
        counts = weight[own].to(values)
        old, target = (getattr(sample, name)[own].to(values) for name in ("values", "returns"))
        loss = (counts * value_loss(values, old, target, config.critic)).sum()
        with torch.no_grad():
            dtype = compute_dtype(learner.critic.backbone)
            made["loss/value"] = loss, (counts * value_slack(values, old, target, config.critic, dtype)).sum()
        learned = learned + (config.critic.coefficient if learner.shares_backbone else 1.0) * loss.cpu()
    return made, learned


def _compared(learner: Learner, seed: int) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield random trained tensors up to the memory limit; none of a sharded model."""
    learning = [(name, p) for name, p in learner.policy.named_parameters() if p.requires_grad and not is_shard(p)]
    if learner.critic is not None and not learner.shares_backbone:
        own = learner.critic.named_parameters()
        learning += [(f"critic.{name}", p) for name, p in own if p.requires_grad and not is_shard(p)]
    left = _MAX_NUMBERS
    for index in shuffled(len(learning), seed):
        name, parameter = learning[index]
        if parameter.numel() <= left:
            left -= parameter.numel()
            yield name, parameter


def _flat(gradient: Tensor | None, parameter: nn.Parameter) -> Tensor:
    found = torch.zeros_like(parameter) if gradient is None else gradient
    return found.detach().flatten().double().cpu()
