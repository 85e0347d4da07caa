"""Reference implementation of training samples, by loops over floats.

The algorithms are implemented again without ``rlcore.algorithms``, so an error there shows as a discrepancy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from rlcore.config import RlConfig
from rlcore.types import ScoredRollout, TrainingSample

EQUAL = 1e-8  # rewards that differ by at most this have no signal
_EPSILON = 1e-6
LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True)
class AlgorithmSpec:
    """Specification of an algorithm by names: baseline of the advantage, ratio, surrogate and weighting.

    ``low``, ``high``: bounds of the ratio below and above 1; for dppo_tv, of the probability difference. ``beta``:
    first coefficient of KL(old || policy); ``target``: of this KL after an update.
    """

    advantage: str
    ratio: str
    surrogate: str
    weighting: str
    low: float = 0.2
    high: float = 0.2
    dual: float = 0.0
    gate_positive: float = 1.0
    gate_negative: float = 1.05
    beta: float = 0.0
    target: float = 0.0


# fmt: off
ROWS: Mapping[str, AlgorithmSpec] = MappingProxyType({
    "ppo":         AlgorithmSpec("gae",           "token",      "clip",      "token_mean"),
    "ppo_penalty": AlgorithmSpec("gae",           "token",      "unclipped", "token_mean", beta=1.0, target=0.01),
    "grpo":        AlgorithmSpec("group",         "token",      "clip",      "sequence_mean"),
    "dr_grpo":     AlgorithmSpec("none",          "token",      "clip",      "constant"),
    "dapo":        AlgorithmSpec("group",         "token",      "clip",      "token_mean", 0.2, 0.28),
    "gspo":        AlgorithmSpec("group",         "sequence",   "clip",      "sequence_mean", 3e-4, 4e-4),
    "cispo":       AlgorithmSpec("group",         "token",      "cispo",     "token_mean", 1.0, 0.28),
    "rloo":        AlgorithmSpec("leave_one_out", "completion", "reinforce", "sequence_sum"),
    "reinforce++": AlgorithmSpec("whole_batch",   "token",      "clip",      "token_mean"),
    "sapo":        AlgorithmSpec("group",         "token",      "sapo",      "sequence_mean"),
    "dppo_tv":     AlgorithmSpec("group",         "token",      "dppo_tv",   "token_mean", 0.15, 0.15),
    "maxrl":       AlgorithmSpec("over_mean",     "token",      "clip",      "token_mean"),
    "distil":      AlgorithmSpec("own",           "token",      "clip",      "token_mean"),
})
# fmt: on


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpectedSamples:
    """Expected columns of an iteration's samples: a float per token, 0 for tokens that are not the policy's."""

    advantages: list[list[float]]
    returns: list[list[float]] | None


def row_of(config: RlConfig) -> AlgorithmSpec | None:
    """Return the algorithm of a run with its constants, or None for an algorithm without reference implementation."""
    row, objective = ROWS.get(config.algorithm), config.update.objective
    if row is None:
        return None
    chosen = {name: getattr(row, name) for name in AlgorithmSpec.__slots__}
    if objective.scale is not None:
        chosen["advantage"] = objective.scale
    settings = {"low": "clip_low", "high": "clip_high", "dual": "dual_clip"}
    settings |= {"beta": "penalty_coefficient", "target": "penalty_target"}
    for name in ("weighting", "gate_positive", "gate_negative", *settings):
        value = getattr(objective, settings.get(name, name))
        if value is not None:
            chosen[name] = value
    return AlgorithmSpec(**chosen)


def is_trainable(item: ScoredRollout, truncated: str) -> bool:
    """Return True if a scored rollout may be trained on."""
    value = item.score.value
    if value is None or math.isnan(value) or not samples_of(item):
        return False
    return not (truncated == "mask" and item.rollout.finish_reason == "length")


def trainable(groups: Sequence[Sequence[ScoredRollout]], config: RlConfig) -> list[tuple[int, ScoredRollout]]:
    """Return the trainable rollouts, each with the number of its group."""
    truncated = config.update.truncated_completions
    return [(n, item) for n, group in enumerate(groups) for item in group if is_trainable(item, truncated)]


def expected(
    groups: Sequence[Sequence[ScoredRollout]],
    samples: Sequence[TrainingSample],
    config: RlConfig,
    *,
    penalty: float,
    next_values: Sequence[float],
) -> ExpectedSamples | None:
    """Return the expected samples of the trainable rollouts of ``groups``, or None without reference implementation.

    Args:
        samples: Training samples, from which log-probabilities and values are read.
        penalty: Coefficient of a KL in the reward, or 0.
        next_values: Critic's value beyond the end of each sample.
    """
    row = row_of(config)
    if row is None:
        return None
    kept, left = trainable(groups, config), iter(samples)
    masks = [sample.loss_mask.tolist() for sample in samples]
    episodes = [
        [
            _token_rewards(part, next(left), config, penalty=penalty, is_paid=number == 0)
            for number, part in enumerate(samples_of(item))
        ]
        for _, item in kept
    ]
    rewards = [each for episode in episodes for each in episode]
    if row.advantage == "gae":
        return _with_critic(rewards, samples, masks, config, next_values)
    if row.advantage == "own":
        pairs = [zip(each, mask, strict=True) for each, mask in zip(rewards, masks, strict=True)]
        return ExpectedSamples(
            advantages=[[value if own else 0.0 for value, own in row] for row in pairs], returns=None
        )
    of_episode = _relative([sum(map(sum, each)) for each in episodes], [number for number, _ in kept], row.advantage)
    of_sample = [value for value, each in zip(of_episode, episodes, strict=True) for _ in each]
    spread = [[value if own else 0.0 for own in mask] for value, mask in zip(of_sample, masks, strict=True)]
    return ExpectedSamples(advantages=spread, returns=None)


def token_weights(masks: Sequence[Sequence[bool]], episodes: Sequence[int], config: RlConfig) -> list[list[float]]:
    """Return the weight of each token of an optimizer step, given the mask and the episode of each of its samples."""
    row, of_episode = row_of(config), dict.fromkeys(episodes, 0)
    for mask, episode in zip(masks, episodes, strict=True):
        of_episode[episode] += sum(mask)
    lengths = [of_episode[episode] for episode in episodes]
    num_tokens = max(1, sum(of_episode.values()))
    num_sequences = max(1, sum(length > 0 for length in of_episode.values()))
    fixed = config.update.objective.constant_length or config.sampling.max_new_tokens
    weighting = row.weighting if row else ""
    counts = {
        "token_mean": [1.0 / num_tokens for _ in masks],
        "sequence_mean": [1.0 / max(1, length) / num_sequences for length in lengths],
        "sequence_sum": [1.0 / num_sequences for _ in masks],
        "constant": [1.0 / (num_sequences * fixed) for _ in masks],
    }[weighting]
    return [[count if own else 0.0 for own in mask] for count, mask in zip(counts, masks, strict=True)]


def clamped(difference: float) -> float:
    """Clamp a log-ratio before its exponential."""
    return min(max(difference, -LOG_RATIO), LOG_RATIO)


def _token_rewards(
    item: ScoredRollout, sample: TrainingSample, config: RlConfig, *, penalty: float, is_paid: bool
) -> list[float]:
    """Return the reward of each token: turn rewards at turn ends, minus the KL to the reference policy.

    ``is_paid``: the sample is the first of its episode, which alone gets the reward.
    """
    rollout, score = item.rollout, item.score
    is_zero = config.update.truncated_completions == "zero" and rollout.finish_reason == "length"
    value = 0.0 if is_zero else float(score.value or 0.0)
    rewards = [0.0] * len(rollout.loss_mask)
    if penalty:
        gaps = zip(sample.old_logprobs.tolist(), sample.ref_logprobs.tolist(), strict=True)
        rewards = [
            -penalty * clamped(old - ref) if own else 0.0
            for own, (old, ref) in zip(rollout.loss_mask, gaps, strict=True)
        ]
    if not is_paid:
        return rewards
    shares = () if is_zero else score.turn_rewards
    ends = [p for p, own in enumerate(rollout.loss_mask) if own and not (*rollout.loss_mask, False)[p + 1]]
    for end, share in zip(ends, shares, strict=False):
        rewards[end] += share
    rewards[ends[-1]] += value - sum(shares)
    return rewards


def _with_critic(
    rewards: Sequence[Sequence[float]],
    samples: Sequence[TrainingSample],
    masks: Sequence[Sequence[bool]],
    config: RlConfig,
    next_values: Sequence[float],
) -> ExpectedSamples:
    """Return whitened advantages, and returns from the unwhitened ones with the critic's lambda."""
    critic, raw, returns = config.critic, [], []
    for earned, sample, mask, beyond in zip(rewards, samples, masks, next_values, strict=True):
        values, length = sample.values.tolist(), max(1, sum(mask))
        alpha = critic.gae.lam_alpha
        lam = max(0.0, 1.0 - 1.0 / (alpha * length)) if alpha > 0.0 else critic.lam
        raw.append(_gae(earned, values, mask, gamma=critic.gamma, lam=lam, beyond=beyond))
        own = critic.lam if critic.gae.lam_value is None else critic.gae.lam_value
        of_value = _gae(earned, values, mask, gamma=critic.gamma, lam=own, beyond=beyond)
        returns.append([advantage + value for advantage, value in zip(of_value, values, strict=True)])
    flat = [value for row, mask in zip(raw, masks, strict=True) for value, own in zip(row, mask, strict=True) if own]
    centre, spread = _mean(flat), _std(flat)
    varies = max(flat) - min(flat) > EQUAL
    white = [
        [(value - centre) / spread if own and varies else 0.0 for value, own in zip(row, mask, strict=True)]
        for row, mask in zip(raw, masks, strict=True)
    ]
    return ExpectedSamples(advantages=white, returns=returns)


def _gae(
    rewards: Sequence[float], values: Sequence[float], mask: Sequence[bool], *, gamma: float, lam: float, beyond: float
) -> list[float]:
    """Return generalised advantages of the policy's tokens, backwards from ``beyond``, the value after the end."""
    found, running, following = [0.0] * len(mask), 0.0, beyond
    for index in reversed(range(len(mask))):
        if mask[index]:
            running = rewards[index] + gamma * following - values[index] + gamma * lam * running
            following = values[index]
            found[index] = running
    return found


def _relative(rewards: Sequence[float], numbers: Sequence[int], kind: str) -> list[float]:
    found = [0.0] * len(rewards)
    groups: dict[int, list[int]] = {}
    for index, number in enumerate(numbers):
        groups.setdefault(0 if kind == "whole_batch" else number, []).append(index)
    for indices in groups.values():
        own = [rewards[index] for index in indices]
        if len(own) < 2 or not max(own) - min(own) > EQUAL:
            continue
        for index in indices:
            found[index] = _advantage(rewards[index], own, rewards, kind)
    return found


def _advantage(reward: float, own: Sequence[float], everyone: Sequence[float], kind: str) -> float:
    centred = reward - _mean(own)
    if kind == "leave_one_out":
        return centred * len(own) / (len(own) - 1)
    if kind == "over_mean":
        return centred / max(_mean(own), (max(own) - min(own)) / len(own)) if _mean(own) > EQUAL else 0.0
    among = everyone if kind in ("batch", "batch_sample") else own
    if kind == "none":
        return centred
    spread = _std(among)
    if kind.endswith("_sample"):
        spread *= math.sqrt(len(among) / (len(among) - 1))
    return centred / (spread + _EPSILON)


def _mean(numbers: Sequence[float]) -> float:
    return math.fsum(numbers) / len(numbers)


def _std(numbers: Sequence[float]) -> float:
    centre = _mean(numbers)
    return math.sqrt(math.fsum((number - centre) ** 2 for number in numbers) / len(numbers))


def samples_of(item: ScoredRollout) -> list[ScoredRollout]:
    """Return the samples of an episode that are trained on, each with the episode's score."""
    own = item.rollout
    return [replace(item, rollout=each) for each in (own, *own.branches) if any(each.loss_mask)]
