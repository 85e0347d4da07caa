"""Audit of prompts, groups and episodes.

The schedule of prompts is recomputed from the seed. Every rollout is in its prompt's group, by ids. Every sample
belongs to its episode, and every sampled token is trained once.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rlcore.checks.audit import Discrepancy
from rlcore.config import RlConfig
from rlcore.errors import CanaryError
from rlcore.seeding import shuffled
from rlcore.training.audit.reference_impl import EQUAL, is_trainable, samples_of
from rlcore.types import Prompt, Rollout, ScoredRollout, TrainingSample

if TYPE_CHECKING:
    from rlcore.components import Components

Groups = Sequence[Sequence[ScoredRollout]]
_CYCLE = 1000  # length of the dataset cycle
_BRANCH_FIX = "check how the calls of an agent become branches, and how branches become training samples"
_FIX = "check how prompts are chosen, and how rollouts are regrouped after sampling and scoring"


def expected_prompts(
    prompts: Sequence[Prompt], weights: Mapping[str, float], config: RlConfig, *, seed: int, iteration: int
) -> list[str] | None:
    """Return the ids of an iteration's prompts, or None with prompt skipping, which depends on earlier rollouts."""
    if config.sampling.zero_signal_keep_prob < 1.0:
        return None
    count, names = config.prompts_per_iteration, tuple[str, ...]([""])
    pools: dict[str, Sequence[Prompt]] = {"": prompts}
    if len(weights) > 1:
        names = _mix(tuple(weights.items()))
        pools = {name: [prompt for prompt in prompts if prompt.dataset == name] for name in weights}
    found = []
    for position in range((iteration - 1) * count, iteration * count):
        rounds, rest = divmod(position, len(names))
        name = names[rest]
        pool = pools[name]
        epoch, number = divmod(rounds * names.count(name) + names[:rest].count(name), len(pool))
        order = _order(len(pool), seed, name, epoch)
        found.append(pool[order[number]].prompt_id)
    return found


def prompt_errors(scheduled: Sequence[Prompt], expected: Sequence[str] | None) -> Iterator[Discrepancy]:
    """Yield a discrepancy if the prompts of an iteration are not the expected ones."""
    if expected is None or [prompt.prompt_id for prompt in scheduled] == list(expected):
        return
    shown = [", ".join(map(repr, ids[:4])) for ids in (list(expected), [prompt.prompt_id for prompt in scheduled])]
    yield Discrepancy("the prompts of the iteration", shown[0], shown[1], fix=_FIX)


def row_errors(groups: Groups, rows: Mapping[str, Prompt]) -> Iterator[Discrepancy]:
    """Yield a discrepancy if a rollout has another reference answer or other columns than its prompt's row, by id."""
    for item in (item for group in groups for item in group):
        found = item.rollout.prompt
        own = rows.get(found.prompt_id, found)
        for name in ("reference", "columns", "task", "dataset"):
            wanted, given = (repr(getattr(prompt, name))[:80] for prompt in (own, found))
            if getattr(own, name) != getattr(found, name):
                fix = "rewards would be those of another prompt"
                yield Discrepancy(f"the {name} of prompt {found.prompt_id!r}", wanted, given, rollout=item, fix=fix)
                return


def version_errors(groups: Groups, iteration: int, *, staleness: int) -> Iterator[Discrepancy]:
    """Yield a discrepancy if a rollout was sampled with other weights than those ``staleness`` updates before."""
    wanted = max(0, iteration - 1 - staleness)
    for item in (item for group in groups for item in group):
        for sample in item.rollout.samples:
            if sample.policy_version != wanted:
                found, fix = sample.policy_version, "check when weights are loaded, and how far rollouts are ahead"
                yield Discrepancy("the policy version of a rollout", wanted, found, rollout=item, fix=fix)
                return


def replacement_errors(
    components: Components, groups: Groups, replaced: Groups, scheduled: Sequence[Prompt], *, iteration: int
) -> Iterator[Discrepancy]:
    """Yield a discrepancy unless dynamic sampling replaced all groups without a signal, by the expected prompts.

    Every round is recomputed. Nothing is, if all rollouts of a group failed: its prompt is then unknown.
    """
    rounds, waiting = components.config.sampling.dynamic_sampling_rounds, list(replaced)
    if not (rounds or replaced) or not all([*groups, *replaced]):
        return
    ids, current, wanted = list(map(_id_of, groups)), [prompt.prompt_id for prompt in scheduled], list[str]()
    fresh = _unused(components, set(current), iteration)
    for _ in range(rounds):
        own = [
            groups[place] if ids[place] == name else next((each for each in waiting if _id_of(each) == name), ())
            for place, name in enumerate(current)
        ]
        without = [place for place, group in enumerate(own) if not _has_signal(group, components.config)]
        for place, name in zip(without, fresh, strict=False):
            waiting = [group for group in waiting if group is not own[place]]
            wanted.append(current[place])
            current[place] = name
    pairs = {"groups": (current, ids), "replaced groups": (wanted, list(map(_id_of, replaced)))}
    for what, (expected, found) in pairs.items():
        if expected != found:
            shown = [", ".join(each)[:80] for each in (expected, found)]
            yield Discrepancy(
                f"the {what} of dynamic sampling, by their rewards", shown[0] or "none", shown[1], fix=_FIX
            )
            return


def _has_signal(group: Sequence[ScoredRollout], config: RlConfig) -> bool:
    truncated = config.update.truncated_completions
    rewards = [
        0.0 if truncated == "zero" and item.rollout.finish_reason == "length" else float(item.score.value or 0.0)
        for item in group
        if is_trainable(item, truncated)
    ]
    return bool(rewards) and max(rewards) - min(rewards) > EQUAL


def _unused(components: Components, used: Collection[str], iteration: int) -> Iterator[str]:
    """Yield the ids of the other prompts in the order in which they replace: shuffled, and interleaved by weight."""
    prompts, weights = components.prompts, components.mixture_weights
    order = [prompts[index] for index in shuffled(len(prompts), components.seed, "replacements", iteration)]
    left = [prompt for prompt in order if prompt.prompt_id not in used]
    names = _mix(tuple(weights.items())) if len(weights) > 1 else ("",)
    pools = {name: iter([each.prompt_id for each in left if name in ("", each.dataset)]) for name in set(names)}
    while pools:
        for name in names:
            found = next(pools[name], None) if name in pools else None
            if found is not None:
                yield found
            else:
                pools.pop(name, None)


def _id_of(group: Sequence[ScoredRollout]) -> str:
    return group[0].rollout.prompt.prompt_id


def group_errors(
    groups: Groups, scheduled: Sequence[Prompt], config: RlConfig, *, num_missing: int
) -> Iterator[Discrepancy]:
    """Yield discrepancies of the groups of an iteration; ``num_missing`` rollouts have failed."""
    if len(groups) != len(scheduled):
        yield Discrepancy("groups", len(scheduled), len(groups), fix=_FIX)
        return
    own = {prompt.prompt_id for prompt in scheduled}
    for number, (group, prompt) in enumerate(zip(groups, scheduled, strict=True), start=1):
        ids = {item.rollout.prompt.prompt_id for item in group}
        others = ids - {prompt.prompt_id}
        is_fresh = config.sampling.dynamic_sampling_rounds > 0 and len(ids) == 1 and not ids & own
        if others and not is_fresh:
            wanted, found = f"one prompt, {prompt.prompt_id!r}", ", ".join(map(repr, sorted(ids)[:4]))
            yield Discrepancy(f"group {number}", wanted, found, rollout=group[0], fix=_FIX)
            return
        if len({item.rollout.prompt.token_ids for item in group}) > 1 and not is_agents(group):
            yield Discrepancy(f"the prompt of group {number} has different tokens", rollout=group[0], fix=_FIX)
            return
    everyone = [item for group in groups for item in group]
    if len({id(item.rollout) for item in everyone}) < len(everyone):
        yield Discrepancy("a rollout is in the training batch twice", fix=_FIX)
    missing = len(groups) * config.group_size - len(everyone)
    if max(map(len, groups), default=0) > config.group_size or missing > num_missing:
        found, wanted = ", ".join(str(len(group)) for group in groups), f"{config.group_size} rollouts each"
        yield Discrepancy("the sizes of the groups", wanted, found[:80], fix=_FIX)


def require_groups(groups: Sequence[Sequence[object]], prompts: Sequence[Prompt], num_samples: int) -> None:
    """Check that an engine returned a group of ``num_samples`` completions per prompt, in order.

    Raises:
        CanaryError: Another number of groups or of completions, or completions of another prompt.
    """
    if len(groups) != len(prompts) or any(len(group) != num_samples for group in groups):
        sizes = ", ".join(str(len(group)) for group in groups)[:80]
        raise CanaryError(
            f"the engine returned groups of {sizes} completions, expected {len(prompts)} of {num_samples}", fix=_FIX
        )
    for number, (group, prompt) in enumerate(zip(groups, prompts, strict=True), start=1):
        others = {item.prompt.prompt_id for item in group if isinstance(item, Rollout)} - {prompt.prompt_id}
        if others:
            raise CanaryError(
                f"group {number} of prompt {prompt.prompt_id!r} has completions of {sorted(others)[0]!r}",
                fix=_FIX,
            )


@functools.lru_cache(maxsize=8)
def _mix(weights: tuple[tuple[str, float], ...]) -> tuple[str, ...]:
    """Return the dataset of each position: the one furthest below its weight, the first among equals."""
    total, counts, names = sum(weight for _, weight in weights), dict.fromkeys(dict(weights), 0), list[str]()
    for position in range(1, _CYCLE + 1):
        name = max(counts, key=lambda each: position * dict(weights)[each] / total - counts[each])
        counts[name] += 1
        names.append(name)
    return tuple(names)


@functools.lru_cache(maxsize=16)
def _order(count: int, seed: int, name: str, epoch: int) -> list[int]:
    return shuffled(count, seed, *(("prompts", name, epoch) if name else ("prompts", epoch)))


def is_agents(items: Sequence[ScoredRollout]) -> bool:
    """Return True if an agent played: prompts are then its own, and its turns are no calls of our tools."""
    return any(item.rollout.num_sampled is not None for item in items)


def episode_errors(
    kept: Sequence[tuple[int, ScoredRollout]], samples: Sequence[TrainingSample]
) -> Iterator[Discrepancy]:
    """Yield discrepancies of the samples' episodes and groups, and of "sampled tokens = trained tokens".

    ``kept``: number of the group and trainable rollout, in the order of the episodes.
    """
    parts = [(episode, group) for episode, (group, item) in enumerate(kept) for _ in samples_of(item)]
    if len(parts) != len(samples):
        yield Discrepancy("samples to train on", len(parts), len(samples), fix=_BRANCH_FIX)
        return
    trained = [0] * len(kept)
    for number, ((episode, group), sample) in enumerate(zip(parts, samples, strict=True)):
        if (sample.episode, sample.group) != (episode, group):
            wanted, found = f"{episode} of group {group}", f"{sample.episode} of group {sample.group}"
            summary, item = f"the episode of sample {number}", kept[episode][1]
            yield Discrepancy(summary, wanted, found, rollout=item, fix=_BRANCH_FIX)
            return
        trained[episode] += int(sample.loss_mask.sum())
    for count, (_, item) in zip(trained, kept, strict=True):
        sampled = item.rollout.num_sampled
        if count != sampled and (item.rollout.branches or sampled is not None):
            wanted = "a count of the sampled ones" if sampled is None else f"the {sampled} that were sampled"
            found = f"{count}, in {len(item.rollout.samples)} samples"
            summary = "the tokens of an episode that are trained on"
            yield Discrepancy(summary, wanted, found, rollout=item, fix=_BRANCH_FIX)
            return


def choose_episodes(samples: Sequence[TrainingSample], count: int, *, seed: int, iteration: int) -> list[list[int]]:
    """Return the indices of the samples of ``count`` random episodes.

    One of them has an advantage if there is any, and one of those several samples if there is any.
    """
    members: dict[int, list[int]] = {}
    for index, sample in enumerate(samples):
        members.setdefault(sample.episode, []).append(index)
    episodes = list(members.values())
    order = [episodes[number] for number in shuffled(len(episodes), seed, "audit", iteration)]
    moved = [own for own in order if any(bool(samples[index].advantages.any()) for index in own)]
    chosen = [*[own for own in moved if len(own) > 1][:1], *order]
    chosen = [own for place, own in enumerate(chosen) if own not in chosen[:place]][:count]
    if not any(own in moved for own in chosen):
        chosen[-1:] = moved[:1] or chosen[-1:]
    return chosen
