"""Sampling and scoring: groups of an iteration, dynamic sampling, and evaluation on held-out problems."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice

import torch

from rlcore.algorithms.advantages import has_signal
from rlcore.checks.audit.prompt_checks import require_groups
from rlcore.checks.canaries.masks import mask_canary
from rlcore.components import HeldOut
from rlcore.errors import RewardError
from rlcore.evaluation.intervals import accuracy, dataset_accuracy, dataset_scores
from rlcore.loop.prompt_schedule import SampledGroups, interleave, replace_groups, unused_prompts
from rlcore.loop.run import Run, timed
from rlcore.loop.weight_sync import prepare_weight_load
from rlcore.rewards.base import check_error_rate, score_each, score_groups
from rlcore.sampling.base import Sampler, SamplingParams
from rlcore.seeding import derive_seed
from rlcore.training.experience import is_trainable, reward_of
from rlcore.types import CORRECT_FROM, FailedRollout, Prompt, Rollout, Score, ScoredRollout, is_correct


def collect_groups(run: Run, iteration: int, seconds: dict[str, float]) -> SampledGroups[list[ScoredRollout]]:
    """Sample and score the groups of an iteration, with dynamic sampling if it is enabled; add their wall ``seconds``.

    Raises:
        SamplingError: The engine is broken.
        CanaryError: A completion is incomplete.
        RewardError: The grader fails on more than a tenth of the rollouts.
    """
    components, sampling = run.components, run.components.config.sampling
    if sampling.staleness:
        with timed(seconds, "rollout"):
            until = min(iteration + sampling.staleness, components.config.num_iterations)
            run.prompt_schedule.prompts_for(until)  # here, so that the choice does not depend on the thread's timing
            sample, prepare = partial(_sample_iteration, run), partial(prepare_weight_load, run)
            rollouts = run.prefetcher.get(sample, iteration, until=until, prepare=prepare)
        with timed(seconds, "score"):
            return SampledGroups(groups=tuple(_score(run, iteration, rollouts)), replaced=())

    def draw(prompts: Sequence[Prompt], *purpose: int) -> list[list[ScoredRollout]]:
        with timed(seconds, "rollout"):
            groups = _collect(run, prompts, *purpose)
        with timed(seconds, "score"):
            return _score(run, iteration, groups)

    prompts = run.prompt_schedule.prompts_for(iteration)
    groups = draw(prompts, iteration)
    if not sampling.dynamic_sampling_rounds:
        return SampledGroups(groups=tuple(groups), replaced=())
    used = {prompt.prompt_id for prompt in prompts}
    unused = unused_prompts(components.prompts, used, seed=components.seed, iteration=iteration)
    fresh = interleave(unused, components.mixture_weights) if len(components.mixture_weights) > 1 else iter(unused)
    return replace_groups(
        groups,
        lambda number, count: draw(list(islice(fresh, count)), iteration, number),
        partial(group_has_signal, truncated=components.config.update.truncated_completions),
        max_rounds=sampling.dynamic_sampling_rounds,
    )


def group_has_signal(group: Sequence[ScoredRollout], *, truncated: str) -> bool:
    """Return True if the rewards of a group's trainable rollouts differ. A KL penalty in the reward does not count."""
    rewards = [reward_of(item, truncated) for item in group if is_trainable(item, truncated)]
    return has_signal(torch.tensor(rewards, dtype=torch.float64))


def record_group_signals(run: Run, iteration: int, sampled: SampledGroups[list[ScoredRollout]]) -> None:
    """Record in the prompt schedule which groups had a signal. Groups without a trainable rollout are left out."""
    truncated = run.components.config.update.truncated_completions
    groups = (
        group for group in (*sampled.groups, *sampled.replaced) if any(is_trainable(item, truncated) for item in group)
    )
    run.prompt_schedule.record_signals(
        iteration,
        ((group[0].rollout.prompt.prompt_id, group_has_signal(group, truncated=truncated)) for group in groups),
    )


def replacement_metrics(sampled: SampledGroups[list[ScoredRollout]], *, truncated: str) -> dict[str, float]:
    """Return the cost of dynamic sampling, and the mean reward of all sampled groups."""
    everything = [item for group in (*sampled.groups, *sampled.replaced) for item in group]
    values = [reward_of(item, truncated) for item in everything if is_trainable(item, truncated)]
    return {
        "groups/replaced": float(len(sampled.replaced)),
        "rollouts/discarded": float(sum(map(len, sampled.replaced))),
        "reward/mean_before_filtering": sum(values) / max(1, len(values)),
    }


def dataset_rewards(groups: Sequence[Sequence[ScoredRollout]], *, truncated: str) -> dict[str, float]:
    """Return the mean reward of each dataset's trainable rollouts, as ``reward/data/<name>``."""
    values: dict[str, list[float]] = {}
    for item in (item for group in groups for item in group if is_trainable(item, truncated)):
        values.setdefault(item.rollout.prompt.dataset, []).append(reward_of(item, truncated))
    return {f"reward/data/{name}": sum(each) / len(each) for name, each in sorted(values.items())}


def _score(run: Run, iteration: int, groups: Sequence[Sequence[Rollout]]) -> list[list[ScoredRollout]]:
    """Score groups. If the grader fails too often, record them with their errors before the run stops."""
    scored = score_groups(run.components.reward, groups)
    try:
        check_error_rate([item.score for group in scored for item in group])
    except RewardError:
        run.recorder.rollouts(iteration, SampledGroups(groups=tuple(scored), replaced=()))
        run.recorder.flush()
        raise
    return scored


Check = Callable[[Sequence[Sequence[Rollout | FailedRollout]], Sequence[Score], Mapping[str, float]], None]


def evaluate_held_out(
    sampler: Sampler, held_out: HeldOut, *, max_new_tokens: int, log: Callable[[str], None], check: Check | None = None
) -> dict[str, float]:
    """Return greedy accuracy on the held-out problems with its interval as ``eval/...``, in total and per dataset.

    A problem that could not be sampled or graded counts as wrong, and in ``eval/failed``. Datasets whose verifier gives
    scores have their mean as ``eval/score/...``. ``check`` gets answers, scores and metrics.
    """
    params = SamplingParams(temperature=1.0, max_new_tokens=max_new_tokens, num_samples=1, greedy=True)
    groups = sampler.sample(held_out.prompts, params, seed=0)
    scores = score_each([each for group in groups for each in group], held_out.verifier)
    failed = [score.error for score in scores if score.error]
    if failed:
        log(f"held-out: ungraded={len(failed)}/{len(scores)} (counted as wrong), for example: {failed[0]}")
    limits, sets = held_out.correct_from, [prompt.dataset for prompt in held_out.prompts]
    correct = [is_correct(score, limits.get(name, CORRECT_FROM)) for score, name in zip(scores, sets, strict=True)]
    interval = accuracy(correct, confidence=held_out.confidence)
    metrics = {
        "eval/accuracy": interval.mean,
        "eval/accuracy_low": interval.low,
        "eval/accuracy_high": interval.high,
        "eval/failed": float(len(failed)),
        **dataset_accuracy(sets, correct),
        **dataset_scores(sets, [score.value for score in scores], limits),
    }
    if check:
        check(groups, scores, metrics)
    return metrics


def _sample_iteration(run: Run, iteration: int) -> list[list[Rollout]]:
    return _collect(run, run.prompt_schedule.prompts_for(iteration), iteration)


def _collect(run: Run, prompts: Sequence[Prompt], *purpose: int) -> list[list[Rollout]]:
    """Sample a group of completions per prompt, and drop those that the engine could not produce."""
    components, config = run.components, run.components.config
    seed = derive_seed(components.seed, "rollouts", *purpose)
    run.audit.check_seed(seed, *purpose)
    temperature, max_new_tokens = config.sampling.temperature, config.sampling.max_new_tokens
    params = SamplingParams(temperature=temperature, max_new_tokens=max_new_tokens, num_samples=config.group_size)
    groups = components.sampler.sample(prompts, params, seed=seed)
    require_groups(groups, prompts, config.group_size)
    failed = [item for group in groups for item in group if isinstance(item, FailedRollout)]
    if failed:
        run.audit.allow_missing(len(failed))
        run.recorder.log(f"rollouts: failed={len(failed)}, for example: {failed[0].reason}")
    sampled = [[rollout for rollout in group if isinstance(rollout, Rollout)] for group in groups]
    mask_canary([rollout for group in sampled for rollout in group], components.tokenizer.eos_ids)
    return sampled


def episode_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return turns, calls, errors and tool tokens of a batch of episodes, by metric name; all 0 for an empty batch."""
    calls = [call for rollout in rollouts for call in rollout.tool_calls]
    num_tokens = sum(len(rollout.loss_mask) for rollout in rollouts)
    num_own = sum(sum(rollout.loss_mask) for rollout in rollouts)
    count = max(1, len(rollouts))
    return {
        "episode/turns": sum(len(rollout.turns) for rollout in rollouts) / count,
        "episode/with_calls": sum(bool(rollout.tool_calls) for rollout in rollouts) / count,
        "episode/parsed": sum(any(call.tool for call in rollout.tool_calls) for rollout in rollouts) / count,
        "episode/tool_calls": len(calls) / count,
        "episode/tool_errors": sum(call.is_error for call in calls) / max(1, len(calls)),
        "episode/tool_tokens": (num_tokens - num_own) / max(1, num_tokens),
    }


def branch_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return the mean number of samples of an episode; nothing if no agent played and no episode has branches."""
    if not any(rollout.branches or rollout.num_sampled is not None for rollout in rollouts):
        return {}
    return {"episode/branches": sum(len(rollout.samples) for rollout in rollouts) / len(rollouts)}
