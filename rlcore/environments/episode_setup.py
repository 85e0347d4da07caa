"""How episodes begin and end around their turns: what is added to a prompt, and what an environment says at the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from rlcore.environments.base import ToolFailure
from rlcore.environments.environment_pool import MAX_FAILURES, EnvironmentPool, episode_seeds
from rlcore.errors import SamplingError
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import FailedRollout, Prompt, Rollout

Key = tuple[int, int]  # which prompt, which sample
_OURS = "the environment: "


@dataclass(frozen=True, kw_only=True)
class EpisodePrompts:
    """The prompts as the policy reads them; ``grown``: by how many tokens each; ``failed``: what could not begin."""

    prompts: list[Prompt]
    num_added_tokens: list[int]
    failed: dict[Key, FailedRollout] = field(default_factory=dict)


def open_episodes(
    tokenizer: ChatTokenizer,
    prompts: Sequence[Prompt],
    *,
    tools: str,
    worlds: EnvironmentPool | None = None,
    numbers: Sequence[int] = (),
    num_samples: int = 0,
    seed: int = 0,
) -> EpisodePrompts:
    """The prompts with the tools declared, and the first observation at the end of the last message.

    Raises:
        SamplingError: an environment begins the episodes of a group differently, or fails more than a tenth of them.
        ModelError: the template cannot write a prompt with tools.
    """
    if worlds is None and not tools:
        return EpisodePrompts(prompts=list(prompts), num_added_tokens=[0] * len(prompts))
    keys = [(i, j) for i in range(len(prompts)) for j in range(num_samples if worlds else 0)]
    seeds = {(i, j): episode_seeds(seed, numbers[i], j) for i, j in keys}
    starts = worlds.reset({key: prompts[key[0]] for key in keys}, seeds) if worlds else {}
    failed = {
        key: FailedRollout(prompt=prompts[key[0]], reason=_OURS + start.reason)
        for key, start in starts.items()
        if isinstance(start, ToolFailure)
    }
    check_failures([each.reason for each in failed.values()], len(keys))  # before the engine samples for nobody
    opened = []
    for i, prompt in enumerate(prompts):
        said = {start for j in range(num_samples) if isinstance(start := starts.get((i, j), ""), str)}
        if len(said) > 1:
            raise SamplingError(
                f"the environment begins the episodes of prompt {prompt.prompt_id!r} differently: {sorted(said)[:2]}",
                fix="a group answers one prompt: in reset, draw from its argument rng alone",
            )
        opened.append(_opened(tokenizer, prompt, "".join(said), tools))
    grown = [len(new.token_ids) - len(old.token_ids) for new, old in zip(opened, prompts, strict=True)]
    return EpisodePrompts(prompts=opened, num_added_tokens=grown, failed=failed)


def assign_rewards(
    worlds: EnvironmentPool, groups: Sequence[Sequence[Rollout | FailedRollout]]
) -> list[list[Rollout | FailedRollout]]:
    """The episodes with what the environment says that each was worth."""
    keys = [(i, j) for i, group in enumerate(groups) for j, made in enumerate(group) if isinstance(made, Rollout)]
    rewards = worlds.rewards(keys)
    return [[_paid(made, rewards.get((i, j))) for j, made in enumerate(group)] for i, group in enumerate(groups)]


def failures_of(name: str, groups: Sequence[Sequence[Rollout | FailedRollout]]) -> list[str]:
    """Why the environment ``name`` has failed episodes."""
    made = [each for group in groups for each in group]
    return [each.reason for each in made if isinstance(each, FailedRollout) and name in each.reason]


def check_failures(reasons: Sequence[str], count: int) -> None:
    """Stop where the environment, not the policy, fails too often; ``count``: of episodes.

    Raises:
        SamplingError: more than a tenth of the episodes; says the first reason.
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


def _paid(made: Rollout | FailedRollout, reward: float | ToolFailure | None) -> Rollout | FailedRollout:
    if isinstance(reward, ToolFailure):
        return FailedRollout(prompt=made.prompt, reason=_OURS + reward.reason)
    return replace(made, environment_reward=reward) if isinstance(made, Rollout) else made
