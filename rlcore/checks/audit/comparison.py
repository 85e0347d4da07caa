"""Comparison of a run with the slow path: discrepancies with expected and actual values."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlcore.algorithms.agreement import LIMITS, SLACK
from rlcore.algorithms.table import ALGORITHMS
from rlcore.checks.audit import Discrepancy
from rlcore.checks.audit.prompt_checks import episode_errors
from rlcore.config import RlConfig
from rlcore.text.tokenization import ChatTokenizer
from rlcore.training.audit.reference_impl import expected, samples_of, trainable
from rlcore.training.audit.slow_path import SlowPathResult
from rlcore.training.audit.trials import Trial
from rlcore.training.experience import Experience
from rlcore.training.minibatches import num_policy_tokens
from rlcore.training.update_stats import UpdateStats
from rlcore.types import ScoredRollout, TrainingSample

if TYPE_CHECKING:
    from rlcore.components import Components

_CLOSE = 1e-4
_FEW = 16  # tokens: the mean of fewer is compared with the limit of single ones
_GRADIENT = 0.02  # tolerance relative to the sum of norms
_NO_GRADIENT = 1e-7


def sample_errors(
    groups: Sequence[Sequence[ScoredRollout]],
    experience: Experience,
    config: RlConfig,
    *,
    penalty: float,
    has_tools: bool,
) -> Iterator[Discrepancy]:
    """Yield the discrepancies of an iteration's samples; ``penalty`` as in ``expected``.

    ``has_tools``: rollouts are episodes, with tokens that the policy did not write and limits per turn.
    """
    samples, beyond = experience.samples, experience.next_values
    episodes = trainable(groups, config)
    if errors := list(episode_errors(episodes, samples)):
        yield from errors
        return
    kept = [each for _, item in episodes for each in samples_of(item)]
    for item, sample in zip(kept, samples, strict=True):
        if error := _shape_error(item, sample, config.sampling.max_new_tokens, has_tools=has_tools):
            yield error
            return
    continues = config.critic.gae.bootstrap_truncated
    for item, value in zip(kept, beyond, strict=True):
        if value and not (continues and item.rollout.finish_reason == "length"):
            yield Discrepancy("the critic's value beyond an end", "0", f"{value:.6g}", rollout=item)
            return
    wanted = expected(groups, samples, config, penalty=penalty, next_values=beyond)
    if wanted is None:
        return
    columns = [("advantage", wanted.advantages, [sample.advantages for sample in samples])]
    if wanted.returns is not None:
        columns.append(("return for the critic", wanted.returns, [sample.returns for sample in samples]))
    for name, ours, theirs in columns:
        yield from _value_errors(name, kept, samples, ours, theirs)


def rollout_error(
    item: ScoredRollout, sample: TrainingSample, tokenizer: ChatTokenizer, rendered: Sequence[int] | None
) -> Discrepancy | None:
    """Return the discrepancy between a rollout's text and its tokens, or None.

    ``rendered``: its rendered prompt; None if an agent wrote it, whose earlier turns are no tool calls of ours either.
    """
    rollout = item.rollout
    if rendered is not None and tuple(rendered) != tuple(sample.prompt_ids):
        shown = (tokenizer.hf_tokenizer.decode(list(ids))[-80:] for ids in (rendered, sample.prompt_ids))
        ours, theirs = map(repr, shown)
        return Discrepancy("the prompt's tokens", ours, theirs, rollout=item)
    start, end = rollout.turns[-1]
    text = tokenizer.decode(rollout.completion_ids[start:end])
    # An agent's answer ends before its stop string, and a crashed agent has none.
    if text != rollout.text and not (rendered is None and text.startswith(rollout.text)):
        return Discrepancy("the text that was scored", repr(text[:80]), repr(rollout.text[:80]), rollout=item)
    turns = [tokenizer.decode(rollout.completion_ids[first:last]) for first, last in rollout.turns[:-1]]
    calls = [call.text for call in rollout.tool_calls[: len(turns)]]
    if rendered is not None and turns != calls:
        return Discrepancy("the texts of earlier turns", str(turns)[:160], str(calls)[:160], rollout=item)
    return None


def slow_path_error(
    items: Sequence[ScoredRollout],
    samples: Sequence[TrainingSample],
    beyond: Sequence[float],
    found: SlowPathResult,
    components: Components,
) -> Discrepancy | None:
    """Return the first discrepancy between the slow path and the training samples, or None.

    ``beyond``: the critic's value beyond the end of each sample.
    """
    for number, (item, sample) in enumerate(zip(items, samples, strict=True)):
        for error in _model_errors(item, sample, beyond[number], found, number, components):
            return error
    for trial, where in ((found.trial, "a few samples"), (found.random_trial, "a few samples at random ratios")):
        if trial is not None and (wrong := _trial_error(trial, where, items[0])):
            return wrong
    return None


def _model_errors(
    item: ScoredRollout,
    sample: TrainingSample,
    beyond: float,
    found: SlowPathResult,
    number: int,
    components: Components,
) -> Iterator[Discrepancy]:
    learner, config = components.learner, components.config
    exact, own, positions = components.coarser_dtype, learner.facts.compute_dtype, list(found.positions[number])
    in_reward = learner.has_reference and config.kl.apply_to == "reward"
    columns: list[tuple[str, Tensor, Tensor, torch.dtype]] = []
    if item.rollout.policy_version == learner.policy_version:
        columns.append(("the engine's log-probabilities", found.logprobs[number], sample.sampler_logprobs, exact))
    if learner.config.update.needs_old_logprobs or in_reward:
        columns.append(("the policy's log-probabilities", found.logprobs[number], sample.old_logprobs, own))
    if found.ref_logprobs and learner.has_reference:
        columns.append(("the reference's log-probabilities", found.ref_logprobs[number], sample.ref_logprobs, own))
    for name, ours, theirs, dtype in columns:
        if place := _logprob_error(ours, theirs[positions], dtype):
            yield Discrepancy(f"{name} (of the token that differs most)", *place, rollout=item)
    if not found.values:
        return
    pairs = [("the critic's values", found.values[number], sample.values[positions])]
    if config.critic.gae.bootstrap_truncated and item.rollout.finish_reason == "length":
        of_end = torch.tensor([found.next_values[number]]), torch.tensor([beyond])
        pairs.append(("the critic's value beyond an end", *of_end))
    for name, ours, theirs in pairs:
        if place := _value_error(ours, theirs, own):
            yield Discrepancy(name, *place, rollout=item)


def _shape_error(item: ScoredRollout, sample: TrainingSample, limit: int, *, has_tools: bool) -> Discrepancy | None:
    rollout = item.rollout
    if sample.completion_ids != rollout.completion_ids or sample.prompt_ids != rollout.prompt.token_ids:
        return Discrepancy("the training tokens", "those of the rollout at this index", "others", rollout=item)
    mask = sample.loss_mask.tolist()
    own = list(rollout.loss_mask) if has_tools else [True] * len(mask)
    if mask != own:
        index = next(number for number, pair in enumerate(zip(mask, own, strict=True)) if pair[0] != pair[1])
        labels = {True: "trained on", False: "masked out"}
        where = f"the loss mask of token {index + 1} of {len(own)}"
        return Discrepancy(where, labels[own[index]], labels[mask[index]], rollout=item)
    if not has_tools and rollout.finish_reason == "length" and len(mask) != limit:
        return Discrepancy("the length of a truncated completion", f"{limit} tokens", len(mask), rollout=item)
    if not torch.equal(sample.sampler_logprobs, torch.tensor(rollout.sampler_logprobs)):
        return Discrepancy("the engine's log-probabilities", "those of the rollout", "others", rollout=item)
    return None


def _value_errors(
    name: str,
    kept: Sequence[ScoredRollout],
    samples: Sequence[TrainingSample],
    ours: Sequence[Sequence[float]],
    theirs: Sequence[Tensor],
) -> Iterator[Discrepancy]:
    for item, sample, wanted, tensor in zip(kept, samples, ours, theirs, strict=True):
        expected_values = torch.tensor(wanted, dtype=torch.float64)
        bound = _CLOSE * expected_values.abs().clamp(min=1.0)
        differs = ((tensor.double() - expected_values).abs() > bound) & sample.loss_mask
        if bool(differs.any()):
            index = int(differs.nonzero()[0, 0])
            what, found = f"the {name} of token {index + 1} of {len(wanted)}", float(tensor[index])
            yield Discrepancy(what, f"{wanted[index]:.6g}", f"{found:.6g}", rollout=item)
            return


def _logprob_error(ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> tuple[str, str] | None:
    """Return both values of a token if rounding does not explain the differences, by the limits of the sync canary."""
    difference = (theirs - ours).abs()
    odds = difference / (-torch.expm1(ours)).clamp(min=SLACK)
    limits = LIMITS[dtype]
    mean_bound = limits.most.mean if len(odds) >= _FEW else limits.most.high
    if float(odds.mean()) <= mean_bound and float(difference.max()) <= limits.max_abs:
        return None
    index = int(difference.argmax())
    return f"{float(ours[index]):.6g}", f"{float(theirs[index]):.6g}"


def _value_error(ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> tuple[str, str] | None:
    share = 0.1 if dtype.itemsize < 4 else 1e-3
    excess = (theirs - ours).abs() - share * (1.0 + ours.abs())
    if float(excess.mean() if dtype.itemsize < 4 else excess.max()) <= 0.0:
        return None
    index = int(excess.argmax())
    return f"{float(ours[index]):.6g}", f"{float(theirs[index]):.6g}"


def _trial_error(trial: Trial, where: str, item: ScoredRollout) -> Discrepancy | None:
    for name, (theirs, ours, slack) in trial.losses.items():
        if not abs(theirs - ours) <= slack + 1e-7:
            return Discrepancy(f"{name} of {where}", f"{ours:.6g}", f"{theirs:.6g}", rollout=item)
    for name, each in trial.gradients.items():
        if not each.distance <= _GRADIENT * each.norm_sum + _NO_GRADIENT:
            return Discrepancy(
                f"the gradient of {name}",
                f"a norm of {each.expected:.4g}",
                f"{each.actual:.4g}, with a difference of norm {each.distance:.4g}",
                rollout=item,
            )
    return None


def metric_errors(
    groups: Sequence[Sequence[ScoredRollout]], experience: Experience, config: RlConfig
) -> Iterator[Discrepancy]:
    """Yield discrepancies of the metrics that health rules read, from the rollouts of an iteration."""
    everyone, truncated = [item.rollout for group in groups for item in group], config.update.truncated_completions
    zeroed = ("length",) if truncated == "zero" else ()
    rewards = [
        0.0 if item.rollout.finish_reason in zeroed else item.score.value or 0.0
        for _, item in trainable(groups, config)
    ]
    mean = math.fsum(rewards) / len(rewards)
    wanted = {
        "reward/mean": mean,
        "reward/std": math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards)),
        "completion/length": sum(len(s.completion_ids) for each in everyone for s in each.samples) / len(everyone),
        "completion/truncated": sum(each.finish_reason == "length" for each in everyone) / len(everyone),
    }
    for name, value in wanted.items():
        found = experience.metrics.get(name, math.nan)
        if not abs(found - value) <= _CLOSE * (1.0 + abs(value)):
            yield Discrepancy(f"the metric {name}", f"{value:.6g}", f"{found:.6g}")


def update_errors(
    stats: UpdateStats, samples: Sequence[TrainingSample], config: RlConfig, *, kl: float
) -> Iterator[Discrepancy]:
    """Yield discrepancies of an update: it must have a gradient, and train on all samples with a signal.

    ``kl``: coefficient of the KL to the reference policy. Skipped steps and the warm-up of a critic are not checked.
    """
    if stats.skipped or stats.policy_version <= config.critic.warmup_iterations:
        return
    teaching = [sample for sample in samples if bool(sample.advantages.any())]
    differ = any(bool(sample.advantages[sample.loss_mask].any()) for sample in teaching)
    rejects = config.update.rollout_correction.mode == "mask"  # masked tokens have no gradient
    if differ and not rejects and not stats.metrics.get("gradient_norm", 0.0) > 0.0:
        summary = "advantages differ, but the gradient of every weight is 0"
        yield Discrepancy(summary, fix="no step was taken, or no trainable weight is in the forward pass")
    in_loss = (kl > 0.0 and config.kl.apply_to == "loss") or config.update.entropy_coefficient > 0.0
    counted = samples if in_loss or ALGORITHMS[config.algorithm].uses_critic else teaching
    expected = num_policy_tokens(counted) / max(1, num_policy_tokens(samples))
    found = stats.metrics["update/token_fraction"]
    if counted and abs(found - expected) > 1e-6:
        yield Discrepancy(
            "the fraction of tokens that were trained on",
            f"{expected:.4f}",
            f"{found:.4f}",
            fix="every micro-batch must be trained on once per epoch; check how they are made",
        )
