"""The groups of an iteration: sampled, scored, and replaced by fresh ones where they carry no signal."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import islice

import torch

from rlcore.algorithms.advantages import has_signal
from rlcore.algorithms.dynamic_sampling import Drawn, fresh_prompts, replace_groups
from rlcore.canaries import mask_canary
from rlcore.rewards.base import check_error_rate
from rlcore.sampling.base import SamplingParams
from rlcore.seeding import derive_seed
from rlcore.training.experience import is_usable, reward_of
from rlcore.types import FailedRollout, Prompt, Rollout, ScoredRollout
from tasks.steps.rewards import MAX_REWARD_ERRORS
from tasks.steps.rl.run import RlRun
from tasks.steps.rl.timing import timed


def draw_groups(run: RlRun, iteration: int, seconds: dict[str, float]) -> Drawn[list[ScoredRollout]]:
    """The iteration's scored groups; with dynamic sampling, those without signal replaced by fresh prompts' groups."""

    def draw(prompts: Sequence[Prompt], *purpose: int) -> list[list[ScoredRollout]]:
        with timed(seconds, "rollout"):
            groups = collect_rollouts(run, prompts, seed=derive_seed(run.seed, "rollouts", *purpose))
        with timed(seconds, "score"):
            return score_rollouts(run, groups)

    if run.rl.sampling.staleness:
        with timed(seconds, "rollout"):
            ahead = run.ahead.advance(partial(rollouts_of, run), iteration, last=run.rl.num_iterations)
        with timed(seconds, "score"):
            return Drawn(groups=tuple(score_rollouts(run, ahead)), replaced=())
    prompts = run.prompts_of(iteration)
    groups = draw(prompts, iteration)
    if not run.rl.sampling.max_replacements:
        return Drawn(groups=tuple(groups), replaced=())
    used = {prompt.prompt_id for prompt in prompts}
    fresh = iter(fresh_prompts(run.prompts, used, seed=run.seed, iteration=iteration))
    return replace_groups(
        groups,
        lambda number, count: draw(list(islice(fresh, count)), iteration, number),
        partial(carries_signal, truncated=run.rl.update.truncated),
        max_rounds=run.rl.sampling.max_replacements,
    )


def rollouts_of(run: RlRun, iteration: int) -> list[list[Rollout]]:
    """What the engine samples for an iteration."""
    return collect_rollouts(run, run.prompts_of(iteration), seed=derive_seed(run.seed, "rollouts", iteration))


def carries_signal(group: Sequence[ScoredRollout], *, truncated: str) -> bool:
    """Whether the rewards of a group's usable rollouts differ; a KL penalty in the reward is not looked at."""
    rewards = [reward_of(item, truncated) for item in group if is_usable(item, truncated)]
    return has_signal(torch.tensor(rewards, dtype=torch.float64))


def replacement_metrics(drawn: Drawn[list[ScoredRollout]], *, truncated: str) -> dict[str, float]:
    """What dynamic sampling cost, and the mean reward of everything that was drawn and could be trained on."""
    everything = [item for group in (*drawn.groups, *drawn.replaced) for item in group]
    values = [reward_of(item, truncated) for item in everything if is_usable(item, truncated)]
    return {
        "groups/replaced": float(len(drawn.replaced)),
        "rollouts/extra": float(sum(map(len, drawn.replaced))),
        "reward/drawn_mean": sum(values) / max(1, len(values)),
    }


def collect_rollouts(run: RlRun, prompts: Sequence[Prompt], *, seed: int) -> list[list[Rollout]]:
    """A group of completions for each prompt; what the engine could not produce is left out."""
    params = SamplingParams(
        temperature=run.rl.sampling.temperature,
        max_new_tokens=run.rl.sampling.max_new_tokens,
        num_samples=run.rl.group_size,
    )
    groups = run.sampler.sample(prompts, params, seed=seed)
    failed = [item for group in groups for item in group if isinstance(item, FailedRollout)]
    if failed:
        run.context.progress(f"{len(failed)} rollouts failed, for example: {failed[0].reason}")
    sampled = [[rollout for rollout in group if isinstance(rollout, Rollout)] for group in groups]
    mask_canary([rollout for group in sampled for rollout in group], run.tokenizer.eos_ids)
    return sampled


def score_rollouts(run: RlRun, groups: Sequence[Sequence[Rollout]]) -> list[list[ScoredRollout]]:
    """Scores in one batched call over all groups; a grader that fails too often stops the run."""
    flat = [rollout for group in groups for rollout in group]
    scores = iter(run.reward(flat))
    scored = [[ScoredRollout(rollout=rollout, score=next(scores)) for rollout in group] for group in groups]
    check_error_rate([item.score for group in scored for item in group], max_rate=MAX_REWARD_ERRORS)
    return scored
