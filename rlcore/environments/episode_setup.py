"""Start and end of episodes: additions to a prompt, and the environment's rewards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from rlcore.environments.base import ToolFailure
from rlcore.environments.environment_pool import MAX_FAILURES, EnvironmentPool, episode_seeds
from rlcore.errors import SamplingError
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import FailedRollout, Prompt, Rollout

Key = tuple[int, int]  # index of the prompt and of the sample
_PREFIX = "the environment: "


@dataclass(frozen=True, kw_only=True)
class EpisodePrompts:
    """Prompts as the policy reads them, the number of tokens added to each, and the episodes that could not begin."""

    prompts: list[Prompt]
    num_added_tokens: list[int]
    failed: dict[Key, FailedRollout] = field(default_factory=dict)


def open_episodes(
    tokenizer: ChatTokenizer,
    prompts: Sequence[Prompt],
    *,
    tools: str,
    environments: EnvironmentPool | None = None,
    numbers: Sequence[int] = (),
    num_samples: int = 0,
    seed: int = 0,
) -> EpisodePrompts:
    """Add the tool declarations and the first observation to the prompts.

    Raises:
        SamplingError: An environment begins episodes of a group differently, or fails in over a tenth of them.
        ModelError: The template cannot write a prompt with tools.
    """
    if environments is None and not tools:
        return EpisodePrompts(prompts=list(prompts), num_added_tokens=[0] * len(prompts))
    keys = [(i, j) for i in range(len(prompts)) for j in range(num_samples if environments else 0)]
    seeds = {(i, j): episode_seeds(seed, numbers[i], j) for i, j in keys}
    starts = environments.reset({key: prompts[key[0]] for key in keys}, seeds) if environments else {}
    failed = {
        key: FailedRollout(prompt=prompts[key[0]], reason=_PREFIX + start.reason)
        for key, start in starts.items()
        if isinstance(start, ToolFailure)
    }
    check_failures([each.reason for each in failed.values()], len(keys))  # before sampling
    opened = []
    for i, prompt in enumerate(prompts):
        first = {start for j in range(num_samples) if isinstance(start := starts.get((i, j), ""), str)}
        if len(first) > 1:
            raise SamplingError(
                f"the environment begins the episodes of prompt {prompt.prompt_id!r} differently: {sorted(first)[:2]}",
                fix="a group has one prompt: in reset, use only random numbers of its argument rng",
            )
        opened.append(_opened(tokenizer, prompt, "".join(first), tools))
    num_added_tokens = [len(new.token_ids) - len(old.token_ids) for new, old in zip(opened, prompts, strict=True)]
    return EpisodePrompts(prompts=opened, num_added_tokens=num_added_tokens, failed=failed)


def assign_rewards(
    environments: EnvironmentPool, groups: Sequence[Sequence[Rollout | FailedRollout]]
) -> list[list[Rollout | FailedRollout]]:
    """Return the episodes with the environment's rewards."""
    keys = [(i, j) for i, group in enumerate(groups) for j, made in enumerate(group) if isinstance(made, Rollout)]
    rewards = environments.rewards(keys)
    return [[_with_reward(made, rewards.get((i, j))) for j, made in enumerate(group)] for i, group in enumerate(groups)]


def failures_of(name: str, groups: Sequence[Sequence[Rollout | FailedRollout]]) -> list[str]:
    """Return the reasons of episodes in which the environment ``name`` failed."""
    made = [each for group in groups for each in group]
    return [each.reason for each in made if isinstance(each, FailedRollout) and name in each.reason]


def check_failures(reasons: Sequence[str], count: int) -> None:
    """Stop if the environment, not the policy, fails too often. ``count`` is the number of episodes.

    Raises:
        SamplingError: More than a tenth of the episodes failed; has the first reason.
    """
    if len(reasons) > MAX_FAILURES * count:
        raise SamplingError(
            f"environment raised in {len(reasons)} of {count} episodes (limit {MAX_FAILURES:.0%}): {reasons[0]}",
            fix="repair the environment; raise rlcore.environments.base.CallError for wrong calls of the policy",
        )


def _opened(tokenizer: ChatTokenizer, prompt: Prompt, observation: str, tools: str) -> Prompt:
    if not observation and not tools:
        return prompt
    messages = prompt.messages
    if observation:
        last = messages[-1]
        messages = (*messages[:-1], replace(last, content=f"{last.content}\n\n{observation}"))
    ids = tokenizer.render_prompt(messages, tools=tools)
    return replace(prompt, messages=messages, token_ids=ids, tools=tools)


def _with_reward(made: Rollout | FailedRollout, reward: float | ToolFailure | None) -> Rollout | FailedRollout:
    if isinstance(reward, ToolFailure):
        return FailedRollout(prompt=made.prompt, reason=_PREFIX + reward.reason)
    return replace(made, environment_reward=reward) if isinstance(made, Rollout) else made
