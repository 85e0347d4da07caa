"""Trials of the audit: a step computed by the update's code and by formula, from plain passes of single sequences.

The same samples go through the code of an update (:meth:`rlcore.training.learner.Learner.trial`) twice, and both times
the formula must agree: unchanged, in micro-batches of one sequence; and with random advantages, ratios, values and
reference log-probabilities, so that ratios are not 1, bounds are active, and every term counts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from rlcore.config import RlConfig
from rlcore.hardware.precision import compute_dtype
from rlcore.hardware.sharded import is_shard
from rlcore.seeding import derive_seed, generator, shuffled
from rlcore.text.packing import TokenSequence
from rlcore.training.audit.loss_formula import (
    Tokens,
    is_marginal,
    kl_parts,
    policy_loss,
    policy_slack,
    value_loss,
    value_slack,
)
from rlcore.training.audit.passes import backbones, in_float32, picked, plain_logprobs, plain_values
from rlcore.training.audit.reference_impl import AlgorithmSpec, token_weights
from rlcore.training.learner import Learner
from rlcore.types import TrainingSample

_MAX_NUMBERS = 1 << 22  # entries of all tensors whose gradients are compared
_TRIES = 8  # draws of random numbers, until none is at a bound


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
        losses: Loss or KL of the update, the same by formula, and its rounding tolerance, by name.
        gradients: Gradient norms, by tensor name.
    """

    losses: Mapping[str, tuple[float, float, float]]
    gradients: Mapping[str, Gradient]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Trials:
    """Both trials, and the log-probabilities of the policy's tokens in their plain passes."""

    logprobs: tuple[Tensor, ...]
    unchanged: Trial
    random: Trial | None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Passes:
    """Plain passes over the policy's tokens of one sample, with gradient for the models that the step trains."""

    logprobs: Tensor
    entropy: Tensor
    values: Tensor | None


class _Sums:
    """Losses of a step by formula with their tolerances, and gradients, summed over its samples."""

    def __init__(self, chosen: Mapping[str, nn.Parameter], scale: float) -> None:
        self._chosen, self._scale = chosen, scale
        self.losses, self.slacks = defaultdict[str, float](float), defaultdict[str, float](float)
        self.gradients = {name: torch.zeros(p.numel(), dtype=torch.float64) for name, p in chosen.items()}
        self.norms = dict.fromkeys(chosen, 0.0)

    def add(self, made: Mapping[str, tuple[Tensor, Tensor]], learned: Tensor, *, is_last: bool) -> None:
        """Add a sample. ``learned``: the sum of its losses that is differentiated, for the last time or not."""
        for name, (loss, slack) in made.items():
            self.losses[name] += float(loss.detach())
            self.slacks[name] += float(slack)
        if not self._chosen or not learned.requires_grad:
            return
        loss, tensors = self._scale * learned, list(self._chosen.values())  # scaled against underflow
        found = torch.autograd.grad(loss, tensors, allow_unused=True, retain_graph=not is_last)
        for (name, parameter), each in zip(self._chosen.items(), found, strict=True):
            gradient = _flat(each, parameter) / self._scale
            self.gradients[name] += gradient
            self.norms[name] += float(gradient.norm())

    def trial(self, losses: Mapping[str, float], theirs: Mapping[str, Tensor]) -> Trial:
        """Compare with the losses and gradients of the update's code."""
        names = [name for name in losses if name in self.losses]
        return Trial(
            losses={name: (losses[name], self.losses[name], self.slacks[name]) for name in names},
            gradients={
                name: Gradient(
                    actual=float(theirs[name].norm()),
                    expected=float(ours.norm()),
                    distance=float((theirs[name] - ours).norm()),
                    norm_sum=self.norms[name],
                )
                for name, ours in self.gradients.items()
            },
        )


def run_trials(learner: Learner, row: AlgorithmSpec, samples: Sequence[TrainingSample], *, seed: int) -> Trials:
    """Compute losses and gradients of two steps by the update's code and by formula, in float32.

    In half precision correct gradients of a sample differ by up to two thirds: they go with 1 - probability, which
    rounding changes by a quarter where a model is confident. A base that is stored in half precision stays in it.
    """
    row = replace(row, beta=learner.penalty.coefficient if learner.penalty else 0.0)  # the current one
    with in_float32(learner):
        return _trials_once(learner, row, samples, seed=seed)


@torch.enable_grad()
def _trials_once(learner: Learner, row: AlgorithmSpec, samples: Sequence[TrainingSample], *, seed: int) -> Trials:
    chosen = [dict(_compared(learner, derive_seed(seed, "tensors", number))) for number in range(2)]
    longest = max(len(sample.prompt_ids) + len(sample.completion_ids) for sample in samples)
    losses, theirs = _update(learner, samples, chosen[0], tokens=longest)
    unchanged, random = (_Sums(each, learner.loss_scale.value) for each in chosen)
    masks, episodes = [sample.loss_mask.tolist() for sample in samples], [sample.episode for sample in samples]
    weights = token_weights(masks, episodes, learner.config)
    logprobs, drawn, is_clear = list[Tensor](), list[TrainingSample](), True
    for number, (sample, each) in enumerate(zip(samples, weights, strict=True)):
        weight = torch.tensor(each)
        passes = _passes(learner, sample, is_compared=any(chosen))
        if losses:  # there are none if no sample has an advantage
            unchanged.add(*_losses_of(learner, row, passes, sample, weight, moved=False), is_last=False)
        made, clear = _draw(learner, row, sample, passes.logprobs, seed=derive_seed(seed, "numbers", number))
        losses_of, learned = _losses_of(learner, row, passes, made, weight, moved=True)
        losses_of |= _kl_of(learner, passes, made, count=sum(map(sum, masks)))  # as every sample has a gradient
        random.add(losses_of, learned, is_last=True)
        logprobs.append(passes.logprobs.detach().float().cpu())
        drawn.append(made)
        is_clear = is_clear and clear
    first = unchanged.trial(losses, theirs)
    # Rounding decides on which side of a bound a token is. This changes gradients, but no loss that is continuous.
    smooth = ("clip", "cispo", "sapo", "unclipped")
    is_smooth = row.surrogate in smooth and learner.config.update.rollout_correction.mode != "mask"
    if not (is_clear or is_smooth):
        return Trials(logprobs=tuple(logprobs), unchanged=first, random=None)
    second = random.trial(*_update(learner, drawn, chosen[1], moved=True))
    second = second if is_clear else replace(second, gradients={})
    return Trials(logprobs=tuple(logprobs), unchanged=first, random=second)


def _update(
    learner: Learner,
    samples: Sequence[TrainingSample],
    chosen: Mapping[str, nn.Parameter],
    *,
    tokens: int | None = None,
    moved: bool = False,
) -> tuple[dict[str, float], dict[str, Tensor]]:
    with _frozen_others(learner, chosen):
        losses = learner.trial(samples, tokens=tokens, moved=moved)
    found = {name: _flat(p.grad, p) / learner.loss_scale.value for name, p in chosen.items()}
    for module in filter(None, (learner.policy, learner.critic)):
        module.zero_grad(set_to_none=True)
    return losses, found


@contextmanager
def _frozen_others(learner: Learner, chosen: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Within the context, tensors that are not compared get no gradient, to save time and memory."""
    models = [tensors for tensors in _learning(learner) if any(name in chosen for name, _ in tensors)]
    others = [parameter for name, parameter in chain(*models) if name not in chosen]
    for parameter in others:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in others:
            parameter.requires_grad_(True)


def _draw(
    learner: Learner, row: AlgorithmSpec, sample: TrainingSample, logprobs: Tensor, *, seed: int
) -> tuple[TrainingSample, bool]:
    own, known, dtype = own_tokens(sample), logprobs.detach(), compute_dtype(learner.policy)
    for number in range(_TRIES):
        made = with_drawn_numbers(sample, own, known, learner.config, row, seed=derive_seed(seed, number))
        if not is_marginal(row, _tokens(made, own, known, known, moved=True), learner.config, dtype):
            return made, True
    return made, False


def own_tokens(sample: TrainingSample) -> list[int]:
    """Return the positions of the policy's tokens."""
    return [index for index, is_own in enumerate(sample.loss_mask.tolist()) if is_own]


def _tokens(sample: TrainingSample, own: Sequence[int], logprobs: Tensor, entropy: Tensor, *, moved: bool) -> Tokens:
    names = ("advantages", "sampler_logprobs", "ref_logprobs", *(["old_logprobs"] if moved else []))
    columns = {name: getattr(sample, name)[list(own)].to(logprobs) for name in names}
    old = columns.pop("old_logprobs", None)
    return Tokens(logprobs=logprobs, entropy=entropy, old=old, **columns)


def _passes(learner: Learner, sample: TrainingSample, *, is_compared: bool) -> _Passes:
    own, config, critic = own_tokens(sample), learner.config, learner.critic
    sequence = TokenSequence(prompt_ids=sample.prompt_ids, completion_ids=sample.completion_ids)
    trains_policy = critic is None or learner.policy_version >= config.critic.warmup_iterations
    with torch.set_grad_enabled(is_compared and trains_policy):
        found = plain_logprobs(learner.policy, sequence, own, config.sampling.temperature)
        logprobs = picked(found, sequence, own)
        learned = found if config.update.entropy_coefficient else found.detach()
        entropy = -(learned.exp() * learned).sum(-1)
    if critic is None:
        return _Passes(logprobs=logprobs, entropy=entropy, values=None)
    is_detached = learner.shares_backbone and (config.critic.detach or not trains_policy)
    with torch.set_grad_enabled(is_compared and not is_detached):
        values = plain_values(critic, sequence, own)
    return _Passes(logprobs=logprobs, entropy=entropy, values=values)


def _losses_of(
    learner: Learner, row: AlgorithmSpec, passes: _Passes, sample: TrainingSample, weight: Tensor, *, moved: bool
) -> tuple[dict[str, tuple[Tensor, Tensor]], Tensor]:
    config, own = learner.config, own_tokens(sample)
    coefficient = learner.kl.coefficient if config.kl.apply_to == "loss" else 0.0
    tokens = _tokens(sample, own, passes.logprobs, passes.entropy, moved=moved)
    counts = weight[own].to(passes.logprobs)
    loss = (counts * policy_loss(row, tokens, config, coefficient)).sum()
    with torch.no_grad():
        slack = (counts * policy_slack(row, tokens, config, coefficient, compute_dtype(learner.policy))).sum()
    made, learned = {"loss/policy": (loss, slack)}, loss.cpu()
    if passes.values is not None and learner.critic is not None:
        values = passes.values
        counts = weight[own].to(values)
        old, target = (getattr(sample, name)[own].to(values) for name in ("values", "returns"))
        loss = (counts * value_loss(values, old, target, config.critic)).sum()
        with torch.no_grad():
            dtype = compute_dtype(learner.critic.backbone)
            made["loss/value"] = loss, (counts * value_slack(values, old, target, config.critic, dtype)).sum()
        learned = learned + (config.critic.coefficient if learner.shares_backbone else 1.0) * loss.cpu()
    return made, learned


def _kl_of(
    learner: Learner, passes: _Passes, sample: TrainingSample, *, count: int
) -> dict[str, tuple[Tensor, Tensor]]:
    tokens = _tokens(sample, own_tokens(sample), passes.logprobs, passes.entropy, moved=True)
    is_in_loss = learner.kl.coefficient > 0.0 and learner.config.kl.apply_to == "loss"
    found = kl_parts(tokens, compute_dtype(learner.policy), has_reference=is_in_loss)
    return {name: (value / count, slack / count) for name, (value, slack) in found.items()}


def _learning(learner: Learner) -> list[list[tuple[str, nn.Parameter]]]:
    """Return the trained tensors of the policy and of a separate critic; none of a sharded model."""
    named = [learner.policy.named_parameters()]
    if learner.critic is not None and not learner.shares_backbone:
        named.append(learner.critic.named_parameters(prefix="critic"))
    return [[(name, p) for name, p in each if p.requires_grad and not is_shard(p)] for each in named]


def _compared(learner: Learner, seed: int) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield random trained tensors up to the memory limit; none of a model that stays in half precision."""
    if any(compute_dtype(model).itemsize < 4 for model in backbones(learner)):
        return
    learning, left = list(chain(*_learning(learner))), _MAX_NUMBERS
    for index in shuffled(len(learning), seed):
        name, parameter = learning[index]
        if parameter.numel() <= left:
            left -= parameter.numel()
            yield name, parameter


def _flat(gradient: Tensor | None, parameter: nn.Parameter) -> Tensor:
    found = torch.zeros_like(parameter) if gradient is None else gradient
    return found.detach().flatten().double().cpu()


def with_drawn_numbers(
    sample: TrainingSample, own: Sequence[int], logprobs: Tensor, config: RlConfig, row: AlgorithmSpec, *, seed: int
) -> TrainingSample:
    """Return a sample with random numbers for the tokens at ``own``; ``logprobs``: their current log-probabilities."""
    draws, count, positions = generator(seed), len(own), torch.tensor(own)
    known = logprobs.detach().float().cpu()
    clip = config.critic.clip_range or 0.2
    columns = {
        "advantages": torch.randn(count, generator=draws),
        "old_logprobs": _drawn_old(known, row, draws).clamp(max=-1e-4),
        "ref_logprobs": (known + torch.rand(count, generator=draws) - 0.5).clamp(max=-1e-4),
        "values": sample.values[positions] + 3.0 * clip * (torch.rand(count, generator=draws) * 2.0 - 1.0),
        "returns": sample.returns[positions] + torch.randn(count, generator=draws),
    }
    made: dict[str, Any] = {
        name: (known_column := getattr(sample, name)).index_copy(0, positions, new.to(known_column))
        for name, new in columns.items()
    }
    return replace(sample, **made)


def _drawn_old(known: Tensor, row: AlgorithmSpec, draws: torch.Generator) -> Tensor:
    """Return log-probabilities of an old policy, at distances from the policy around the clipping bounds."""
    each, together = (torch.rand(size, generator=draws) * 2.0 - 1.0 for size in (len(known), 1))
    bound = 0.3 if row.surrogate in ("sapo", "unclipped") else min(0.3, max(row.low, row.high))
    if row.surrogate == "dppo_tv":
        return (known.exp() + 3.0 * bound * each).clamp(min=1e-4, max=1.0).log()
    if row.ratio == "token":
        return known - 4.0 * bound * each
    if row.ratio == "sequence":
        return known - 2.0 * bound * together - bound * each
    return known - 3.0 * bound * together / max(1, len(known))
