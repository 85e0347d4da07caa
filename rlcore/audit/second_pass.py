"""The models' side of an audit: plain forward passes of single sequences, and a loss by formula with its gradient.

One sequence at a time, unpacked, with the library's own logits: no tree, no chunk, no fused head. The same samples go
through the code of an update (:meth:`rlcore.training.learner.Learner.trial`), and both are told.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from rlcore.audit.plain import Row, row_of, token_weights
from rlcore.audit.sampling import features_of
from rlcore.models.architectures import shares_prompts
from rlcore.models.heads import ScalarModel
from rlcore.models.lora import AdaptedModel, activate
from rlcore.models.precision import at_least_float32, autocast
from rlcore.models.sharded import device_of, whole_pass
from rlcore.packing import TokenSequence
from rlcore.ranks import is_shard
from rlcore.seeding import generator, shuffled
from rlcore.training.learner import Learner
from rlcore.types import TrainingSample

MOST_TOKENS = 256  # of a completion that are looked at: their logits stand in memory, [tokens, vocabulary]
_MOST_NUMBERS = 1 << 22  # of a tensor whose gradient is compared
_NUM_TENSORS = 2


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Examined:
    """What the second pass says of S samples, by places of their completions.

    ``places``: which tokens were looked at. ``logprobs``, ``ref_logprobs``, ``values``: of these tokens, empty where
    there is no such model. ``features``: what :mod:`rlcore.audit.sampling` asks of their distributions. ``losses``: by
    name, as an update's code has it, by formula, and how large its parts are. ``gradients``: of a tensor by its name,
    the norm of an update's, the norm by formula, and the cosine between them.
    """

    places: tuple[tuple[int, ...], ...]
    logprobs: tuple[Tensor, ...]
    ref_logprobs: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    features: tuple[Tensor, ...]
    losses: Mapping[str, tuple[float, float, float]]
    gradients: Mapping[str, tuple[float, float, float]]


def examine(
    learner: Learner, reference: Any, samples: Sequence[TrainingSample], *, eos_ids: Sequence[int], seed: int
) -> Examined:
    """Look at ``samples`` before the update that trains on them; no weight moves, and no gradient is left behind."""
    temperature = learner.config.sampling.temperature
    places = [_drawn(sample, seed, number) for number, sample in enumerate(samples)]
    asked = list(zip(samples, places, strict=True))
    with torch.no_grad():
        own = [_logprobs(learner.policy, *each, temperature) for each in asked]
        ref = [_picked(_logprobs(reference, *each, temperature), *each) for each in asked if reference is not None]
        critic = learner.critic
        values = [plain_values(critic, *each) for each in asked if critic is not None]
        features = [
            features_of(found, _targets(*each), temperature, eos_ids) for found, each in zip(own, asked, strict=True)
        ]
        logprobs = [_picked(found, *each) for found, each in zip(own, asked, strict=True)]
    losses, gradients = _compare_losses(learner, [_cut(sample) for sample in samples], seed=seed)
    return Examined(
        places=tuple(places),
        logprobs=tuple(each.float().cpu() for each in logprobs),
        ref_logprobs=tuple(each.float().cpu() for each in ref),
        values=tuple(each.float().cpu() for each in values),
        features=tuple(each.cpu() for each in features),
        losses=losses,
        gradients=gradients,
    )


def plain_logits(model: Any, prompt_ids: Sequence[int], completion_ids: Sequence[int], places: Sequence[int]) -> Tensor:
    """The logits [n, V] that predict the completion's tokens at ``places``, by one forward pass of the library's."""
    base = model.base if isinstance(model, AdaptedModel) else model
    if isinstance(model, AdaptedModel):
        activate(base, model.name)
    tokens = torch.tensor([[*prompt_ids, *completion_ids]], device=device_of(base))
    rows = torch.tensor([len(prompt_ids) - 1 + place for place in places], device=device_of(base))

    def forward() -> Tensor:
        with autocast(model):
            if shares_prompts(base):
                found: Tensor = base(tokens, use_cache=False, logits_to_keep=rows).logits[0]
            else:
                found = base(tokens, use_cache=False).logits[0, rows]
        return at_least_float32(found)

    return whole_pass(model, forward)


def plain_values(critic: ScalarModel, sample: TrainingSample, places: Sequence[int]) -> Tensor:
    """The critic's value [n] before the tokens at ``places``: its trunk on one sequence, and its head."""
    trunk: Any = critic.backbone
    tokens = torch.tensor([[*sample.prompt_ids, *sample.completion_ids]], device=device_of(trunk))
    rows = [len(sample.prompt_ids) - 1 + place for place in places]

    def forward() -> Tensor:
        with autocast(trunk):
            states = trunk.base_model(input_ids=tokens, use_cache=False).last_hidden_state[0, rows]
        return critic.state_values(states)

    return whole_pass(critic, forward)


@torch.no_grad()
def plain_scores(model: ScalarModel, sequence: TokenSequence) -> float:
    """A reward model's score of one completion, read at the last token of a plain forward pass."""
    trunk: Any = model.backbone
    if isinstance(trunk, AdaptedModel):
        activate(trunk.base, trunk.name)
    tokens = torch.tensor([[*sequence.prompt_ids, *sequence.completion_ids]], device=device_of(trunk))
    with autocast(trunk):
        states = trunk.base_model(input_ids=tokens, use_cache=False).last_hidden_state[0, -1:]
    return float(model.state_values(states))


def _drawn(sample: TrainingSample, seed: int, number: int) -> tuple[int, ...]:
    """The policy's own tokens, and of very many some that are drawn by chance."""
    own = [place for place, is_own in enumerate(sample.loss_mask.tolist()) if is_own]
    order = shuffled(len(own), seed, "places", number)[:MOST_TOKENS]
    return tuple(sorted(own[place] for place in order))


def _targets(sample: TrainingSample, places: Sequence[int]) -> Tensor:
    return torch.tensor([sample.completion_ids[place] for place in places])


def _logprobs(model: Any, sample: TrainingSample, places: Sequence[int], temperature: float) -> Tensor:
    """The log-probabilities of the whole vocabulary [n, V] at some places."""
    return (plain_logits(model, sample.prompt_ids, sample.completion_ids, places) / temperature).log_softmax(-1)


def _picked(logprobs: Tensor, sample: TrainingSample, places: Sequence[int]) -> Tensor:
    return logprobs.gather(-1, _targets(sample, places).to(logprobs.device)[:, None])[:, 0]


def _cut(sample: TrainingSample) -> TrainingSample:
    """The sample's beginning, of a length whose logits fit into memory: a sample like any other."""
    fields = ("loss_mask", "sampler_logprobs", "old_logprobs", "ref_logprobs", "advantages", "values", "returns")
    cut = {name: getattr(sample, name)[:MOST_TOKENS] for name in fields}
    return replace(sample, completion_ids=sample.completion_ids[:MOST_TOKENS], **cut)


def _compare_losses(
    learner: Learner, samples: Sequence[TrainingSample], *, seed: int
) -> tuple[dict[str, tuple[float, float, float]], dict[str, tuple[float, float, float]]]:
    """The losses of a step on ``samples`` and gradients of a few tensors, by the code of an update and by formula."""
    row = row_of(learner.config)
    if row is None:
        return {}, {}
    chosen = dict(_compared(learner, seed))
    found = learner.trial(samples)
    scale = learner.loss_scale.value
    theirs = {name: _flat(parameter.grad, parameter) / scale for name, parameter in chosen.items()}
    for module in filter(None, (learner.policy, learner.critic)):
        module.zero_grad(set_to_none=True)
    masks = [sample.loss_mask.tolist() for sample in samples]
    weights = token_weights(masks, learner.config)
    sums = dict.fromkeys(found, 0.0)
    sizes = dict.fromkeys(found, 0.0)
    ours = {name: torch.zeros_like(each) for name, each in theirs.items()}
    for sample, weight in zip(samples, weights, strict=True):
        with torch.set_grad_enabled(bool(chosen)):
            parts, learned = _losses_of(learner, row, sample, torch.tensor(weight), found.keys())
        for name, part in parts.items():
            sums[name] += float(part.detach().sum())
            sizes[name] += float(part.detach().abs().sum())
        if chosen and learned.requires_grad:
            made = torch.autograd.grad(learned, list(chosen.values()), allow_unused=True)
            for (name, parameter), gradient in zip(chosen.items(), made, strict=True):
                ours[name] += _flat(gradient, parameter)
    losses = {name: (found[name], sums[name], sizes[name]) for name in sums}
    return losses, {name: _alike(theirs[name], ours[name]) for name in chosen}


def _losses_of(
    learner: Learner, row: Row, sample: TrainingSample, weight: Tensor, names: Any
) -> tuple[dict[str, Tensor], Tensor]:
    """The loss of each token by the name of its sum, and the sum that the policy's weights learn from."""
    config, parts = learner.config, dict[str, Tensor]()
    own = [place for place, is_own in enumerate(sample.loss_mask.tolist()) if is_own]
    learned = torch.zeros(())
    if "loss/policy" in names:
        found = _logprobs(learner.policy, sample, own, config.sampling.temperature)
        coefficient = learner.kl.coefficient if config.kl.placement == "loss" else 0.0
        columns = {name: getattr(sample, name)[own].to(found) for name in ("advantages", *_MEASURED)}
        tokens = _policy_loss(
            row, _picked(found, sample, own), -(found.exp() * found).sum(-1), columns, config, coefficient
        )
        parts["loss/policy"] = weight[own].to(found) * tokens
        learned = learned + parts["loss/policy"].sum().cpu()
    if "loss/value" in names and learner.critic is not None:
        spares = config.critic.detach or "loss/policy" not in names  # which is missing while a critic warms up
        with torch.set_grad_enabled(torch.is_grad_enabled() and learner.shares_trunk and not spares):
            values = plain_values(learner.critic, sample, own)
        old, target = (getattr(sample, name)[own].to(values) for name in ("values", "returns"))
        parts["loss/value"] = weight[own].to(values) * _value_loss(values, old, target, config.critic)
        if learner.shares_trunk:
            learned = learned + config.critic.coefficient * parts["loss/value"].sum().cpu()
    return parts, learned


_MEASURED = ("sampler_logprobs", "ref_logprobs")


def _policy_loss(
    row: Row, logprobs: Tensor, entropy: Tensor, columns: Mapping[str, Tensor], config: Any, coefficient: float
) -> Tensor:
    """The loss of each token of one sequence [n], before its weight, in the first step of an update."""
    old = logprobs.detach()
    log_ratio = logprobs - old
    if row.ratio == "sequence":
        log_ratio = log_ratio.mean().expand(len(log_ratio))
    elif row.ratio == "completion":
        log_ratio = log_ratio.sum().expand(len(log_ratio))
    loss = _surrogate(row, log_ratio, logprobs, columns["advantages"])
    if coefficient > 0.0:
        gap = (logprobs - columns["ref_logprobs"]).clamp(-20.0, 20.0)
        ratio = (logprobs - old).exp()
        k3 = (-gap).exp() - 1.0 + gap
        kinds = {
            "k1_ratio": ratio * gap,
            "k2": ratio.detach() * gap**2 / 2.0,
            "k3_ratio": ratio * k3,
            "k2_plain": gap**2 / 2.0,
            "k3_plain": k3,
        }
        loss = loss + coefficient * kinds[config.kl.estimator]
    loss = loss - config.update.entropy_coefficient * entropy
    weighted: Tensor = loss * _mismatch(old - columns["sampler_logprobs"], config.update.mismatch)
    return weighted


def _surrogate(row: Row, log_ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
    """The surrogate [n] at a ratio of 1, where no bound cuts: what is left is its value and its gradient."""
    ratio = log_ratio.exp()
    if row.surrogate in ("cispo", "reinforce"):
        return -ratio.detach() * advantages * logprobs
    if row.surrogate == "sapo":
        tau = torch.where(advantages > 0, row.gate_positive, row.gate_negative)
        return -advantages * 4.0 / tau / (1.0 + (-tau * (ratio - 1.0)).exp())
    return -ratio * advantages


def _mismatch(gap: Tensor, config: Any) -> Tensor:
    """What a token counts for the engine's log-probability being another: detached [n]."""
    gap = gap.clamp(-20.0, 20.0)
    weight = (gap.mean().expand(len(gap)) if config.level == "sequence" else gap).exp()
    if config.mode == "mask":
        return torch.where((weight < config.low) | (weight > config.upper), 0.0, weight)
    return weight.clamp(max=config.upper) if config.mode == "truncate" else torch.ones_like(weight)


def _value_loss(values: Tensor, old: Tensor, target: Tensor, config: Any) -> Tensor:
    """Half the larger of the squared (or Huber's) errors of the value and of the clipped value [n]."""
    errors = [(values - target).abs()]
    if config.clip_range:
        near = old + (values - old).clamp(-config.clip_range, config.clip_range)
        errors.append((near - target).abs())
    delta = config.huber_delta
    if delta:
        errors = [torch.where(e <= delta, e**2, delta * (2.0 * e - delta)) for e in errors]
    else:
        errors = [e**2 for e in errors]
    return 0.5 * torch.stack(errors).amax(0)


def _compared(learner: Learner, seed: int) -> Iterator[tuple[str, nn.Parameter]]:
    """A few tensors of the policy that learn, by chance; none of a model in shards."""
    learning = [
        (name, parameter)
        for name, parameter in learner.policy.named_parameters()
        if parameter.requires_grad and parameter.numel() <= _MOST_NUMBERS and not is_shard(parameter)
    ]
    order = torch.randperm(len(learning), generator=generator(seed, "tensors")).tolist()
    return (learning[place] for place in order[:_NUM_TENSORS])


def _flat(gradient: Tensor | None, parameter: nn.Parameter) -> Tensor:
    found = torch.zeros_like(parameter) if gradient is None else gradient
    return found.detach().flatten().double().cpu()


def _alike(theirs: Tensor, ours: Tensor) -> tuple[float, float, float]:
    one, other = float(theirs.norm()), float(ours.norm())
    return one, other, float(theirs @ ours) / (one * other) if one and other else 0.0
