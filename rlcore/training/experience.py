"""Training samples from scored rollouts: reference and value passes, penalties, advantages, returns.

An episode with branches becomes several samples. It has one reward and one KL penalty, the sum over its samples, and
therefore one advantage, which all of them get.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlcore.algorithms.advantages import AdvantageInputs, has_signal, lay_out_episodes, whiten
from rlcore.algorithms.kl import k1, k3
from rlcore.algorithms.objective import explained_variance
from rlcore.algorithms.surrogates import clamped_difference
from rlcore.algorithms.table import Algorithm
from rlcore.config import KlConfig
from rlcore.errors import NonFiniteError, TrainingError
from rlcore.rewards.mix import term_statistics
from rlcore.text.packing import TokenSequence
from rlcore.training.scoring_models import ForwardScores, ScoresCompletions
from rlcore.types import Rollout, ScoredRollout, TrainingSample

if TYPE_CHECKING:
    from jaxtyping import Float64


_MAX_REWARD = 1e18  # with larger ones the variance of a group would be infinite, and all its advantages 0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Experience:
    """Training samples of one iteration, with metrics.

    Attributes:
        mean_kl: Mean KL to the reference policy in nats per episode, which the adaptive coefficient reads.
        next_values: Critic's value after the end of each sample, 0 without one.
    """

    samples: tuple[TrainingSample, ...]
    metrics: Mapping[str, float]
    mean_kl: float
    next_values: tuple[float, ...]

    @property
    def num_episodes(self) -> int:
        return len({sample.episode for sample in self.samples})


def build_experience(
    groups: Sequence[Sequence[ScoredRollout]],
    algorithm: Algorithm,
    scoring_models: ScoresCompletions,
    *,
    kl: KlConfig,
    kl_coefficient: float,
    truncated: str,
    need_old_logprobs: bool,
) -> Experience:
    """Turn the scored groups of one iteration into training samples.

    A rollout without score (or, with ``truncated="mask"``, a truncated one) is excluded from both baseline and loss, so
    that numerator and denominator agree. ``truncated="zero"`` scores a truncated completion 0.

    Raises:
        TrainingError: No rollout can be trained on, or an episode has branches and the algorithm a critic.
        NonFiniteError: A grader returned an infinite reward, or one whose square float32 cannot hold.
    """
    numbered = [(number, item) for number, group in enumerate(groups) for item in group]
    _refuse_infinite([item for _, item in numbered])
    kept = [(number, item) for number, item in numbered if is_trainable(item, truncated)]
    if not kept:
        raise _untrainable([item for _, item in numbered])
    parts = [item.rollout.trained_samples for _, item in kept]
    if algorithm.uses_critic:
        _refuse_branches(parts)
    rollouts = [rollout for part in parts for rollout in part]
    masks = [torch.tensor(rollout.loss_mask) for rollout in rollouts]
    in_reward = scoring_models.has_reference and kl.apply_to == "reward"
    cut = [index for index, rollout in enumerate(rollouts) if rollout.finish_reason == "length"]
    passes = scoring_models.passes(token_sequences(rollouts), needs_policy=need_old_logprobs or in_reward, cut=cut)
    gaps = _reference_gaps(passes, masks) if in_reward else [torch.zeros(len(mask)) for mask in masks]
    of_episodes = _joined(gaps, parts)
    episodes = lay_out_episodes(
        [token_rewards(item, truncated) for _, item in kept],
        [number for number, _ in kept],
        [-kl_coefficient * k1(gap).double() for gap in of_episodes],
        _joined(passes.values, parts),
        _joined(masks, parts),
        passes.next_values[_starts(map(len, parts))],
    )
    samples = _samples(parts, masks, passes, episodes, algorithm)
    metrics = _metrics(numbered, kept, samples, episodes, uses_critic=algorithm.uses_critic)
    rewards = torch.tensor([reward_of(item, truncated) for _, item in kept], dtype=torch.float64)
    metrics |= {"reward/mean": float(rewards.mean()), "reward/std": float(rewards.std(unbiased=False))}
    if in_reward:
        metrics["kl/ref"] = float(torch.cat([k3(gap)[mask] for gap, mask in zip(gaps, masks, strict=True)]).mean())
    mean_kl = float(torch.stack([gap.sum() for gap in of_episodes]).mean())
    return Experience(samples=samples, metrics=metrics, mean_kl=mean_kl, next_values=tuple(passes.next_values.tolist()))


def _refuse_branches(parts: Sequence[Sequence[Rollout]]) -> None:
    """Raise TrainingError if an episode has branches: GAE follows values from each token to the next."""
    for part in parts:
        if len(part) > 1:
            raise TrainingError(
                f"an episode has {len(part)} samples, and the advantages of a critic need one sequence of tokens",
                where=f"prompt {part[0].prompt.prompt_id!r}; the second is a sample of its own because: {part[1].fork}",
                fix="set sampling.agent.branches to 'main' or 'refuse', or choose an algorithm without a critic: grpo",
            )


def _starts(lengths: Iterable[int]) -> list[int]:
    """Return the index of the first element of each of consecutive runs: [2, 1, 3] gives [0, 2, 3]."""
    return list(accumulate(lengths, initial=0))[:-1]


def _joined(columns: Sequence[Tensor], parts: Sequence[Sequence[Rollout]]) -> list[Tensor]:
    starts = _starts(map(len, parts))
    return [torch.cat(list(columns[start : start + len(part)])) for start, part in zip(starts, parts, strict=True)]


def _untrainable(items: Sequence[ScoredRollout]) -> TrainingError:
    errors = [item.score.error for item in items if not _is_scored(item)]
    cut = sum(item.rollout.finish_reason == "length" for item in items)
    if not items:
        what, fix = "the engine completed none", "see the reason in the log line 'rollouts: failed'"
    elif errors and len(errors) >= cut:
        what = f"{len(errors)} of {len(items)} have no score, for example: {errors[0]}"
        fix = "read the errors in the rollout table, and correct the reward"
    elif cut:
        what = f"{cut} of {len(items)} were cut at sampling.max_new_tokens, and truncated_completions = 'mask'"
        fix = "raise sampling.max_new_tokens, or set update.truncated_completions to 'score' or 'zero'"
    else:
        what, fix = "they hold no token of the policy", "check the loss masks of the sampler"
    return TrainingError(f"none of the iteration's rollouts can be trained on: {what}", fix=fix)


def is_trainable(item: ScoredRollout, truncated: str) -> bool:
    """Return True if a rollout is scored, has a token of the policy, and is not a masked truncation."""
    masked = truncated == "mask" and item.rollout.finish_reason == "length"
    return _is_scored(item) and bool(item.rollout.trained_samples) and not masked


def reward_of(item: ScoredRollout, truncated: str) -> float:
    """Return the reward of a trainable rollout, 0 for a truncated one with ``truncated="zero"``."""
    return 0.0 if _is_zeroed(item, truncated) else float(item.score.value or 0.0)


def token_rewards(item: ScoredRollout, truncated: str) -> Float64[Tensor, "time"]:
    """Return the reward of a trainable rollout per token: float64 [T], nonzero only at the ends of its turns.

    The tokens are those of its samples in order; the reward is in the first, which has the last answer. Its last token
    gets the part of the score that belongs to no turn, so the sum is :func:`reward_of`. A truncated completion with
    reward 0 has reward 0 in all turns.

    Raises:
        TrainingError: Numbers of turn rewards and turns differ.
    """
    parts, reward = item.rollout.trained_samples, reward_of(item, truncated)
    turns = parts[0].turns
    turn_rewards = () if _is_zeroed(item, truncated) else item.score.turn_rewards
    if turn_rewards and len(turn_rewards) != len(turns):
        raise TrainingError(
            f"a score has {len(turn_rewards)} turn rewards, but its rollout has {len(turns)} turns",
            where=f"prompt {item.rollout.prompt.prompt_id!r}",
            fix="return one reward per turn, or one for the whole rollout",
        )
    rewards = torch.zeros(sum(len(part.loss_mask) for part in parts), dtype=torch.float64)
    for (_, end), turn_reward in zip(turns, turn_rewards, strict=False):
        rewards[end - 1] = turn_reward
    rewards[turns[-1][1] - 1] += reward - sum(turn_rewards)
    return rewards


def _is_zeroed(item: ScoredRollout, truncated: str) -> bool:
    return truncated == "zero" and item.rollout.finish_reason == "length"


def _is_scored(item: ScoredRollout) -> bool:
    return item.score.value is not None and not math.isnan(item.score.value)


def _refuse_infinite(items: Sequence[ScoredRollout]) -> None:
    for item in items:
        if item.score.value is not None and abs(item.score.value) > _MAX_REWARD:
            raise NonFiniteError(
                f"the reward of a completion is {item.score.value}",
                where=f"prompt {item.rollout.prompt.prompt_id!r}, terms {dict(item.score.terms)}",
                fix="correct the reward function: a grader that cannot score a rollout returns None",
            )


def token_sequences(rollouts: Sequence[Rollout]) -> list[TokenSequence]:
    """Return the sequences to pack."""
    return [TokenSequence(prompt_ids=each.prompt.token_ids, completion_ids=each.completion_ids) for each in rollouts]


def _reference_gaps(passes: ForwardScores, masks: Sequence[Tensor]) -> list[Tensor]:
    return [clamped_difference(old, ref, mask) for old, ref, mask in zip(passes.old, passes.ref, masks, strict=True)]


def _samples(
    parts: Sequence[Sequence[Rollout]],
    masks: Sequence[Tensor],
    passes: ForwardScores,
    episodes: AdvantageInputs,
    algorithm: Algorithm,
) -> tuple[TrainingSample, ...]:
    raw = algorithm.advantage(episodes)
    advantages = whiten(raw, episodes.mask) if algorithm.uses_critic else raw
    targets = algorithm.value_advantage(episodes) if algorithm.value_advantage else raw
    samples: list[TrainingSample] = []
    for episode, part in enumerate(parts):
        for rollout, start in zip(part, _starts(len(each.loss_mask) for each in part), strict=True):
            i, span = len(samples), slice(start, start + len(rollout.loss_mask))
            samples.append(
                TrainingSample(
                    episode=episode,
                    group=int(episodes.group[episode]),
                    prompt_ids=rollout.prompt.token_ids,
                    completion_ids=rollout.completion_ids,
                    loss_mask=masks[i],
                    sampler_logprobs=torch.tensor(rollout.sampler_logprobs),
                    old_logprobs=passes.old[i],
                    ref_logprobs=passes.ref[i],
                    advantages=advantages[episode, span],
                    values=passes.values[i],
                    returns=targets[episode, span] + passes.values[i],
                    replica=rollout.replica,
                )
            )
    return tuple(samples)


def _without_signal(samples: Sequence[TrainingSample], episodes: AdvantageInputs) -> list[bool]:
    """Return for each group whether its rewards are equal, or it is a single episode with advantage 0."""
    indices: dict[int, list[int]] = {}
    for index, number in enumerate(episodes.group.tolist()):
        indices.setdefault(number, []).append(index)
    moved = {sample.episode for sample in samples if bool(sample.advantages.any())}
    return [not has_signal(episodes.rewards[own]) if len(own) > 1 else own[0] not in moved for own in indices.values()]


def _metrics(
    numbered: Sequence[tuple[int, ScoredRollout]],
    kept: Sequence[tuple[int, ScoredRollout]],
    samples: Sequence[TrainingSample],
    episodes: AdvantageInputs,
    *,
    uses_critic: bool,
) -> dict[str, float]:
    lengths = [sum(len(sample.completion_ids) for sample in item.rollout.samples) for _, item in numbered]
    cut = [item.rollout.finish_reason == "length" for _, item in numbered]
    without_signal = _without_signal(samples, episodes)
    advantages = torch.cat([sample.advantages[sample.loss_mask] for sample in samples])
    metrics = {
        "reward/errors": float(sum(not _is_scored(item) for _, item in numbered)),
        "completion/length": sum(lengths) / len(lengths),
        "completion/truncated": sum(cut) / len(cut),
        "groups/zero_signal": sum(without_signal) / len(without_signal),
        "entropy/sampled": -float(torch.cat([sample.sampler_logprobs[sample.loss_mask] for sample in samples]).mean()),
        "advantage/mean": float(advantages.mean()),
        "advantage/std": float(advantages.std(unbiased=False)),
    }
    metrics |= term_statistics([item.score for _, item in kept], all_scores=[item.score for _, item in numbered])
    if uses_critic:
        values = torch.cat([sample.values[sample.loss_mask] for sample in samples])
        returns = torch.cat([sample.returns[sample.loss_mask] for sample in samples])
        metrics["value/explained_variance"] = explained_variance(values, returns)
    return metrics
