"""Audit of prompts and groups: the prompts of an iteration are scheduled, and every rollout is in its prompt's group.

The schedule is recomputed exactly from the seed; groups are compared by ids.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rlcore.checks.audit.discrepancy import Discrepancy
from rlcore.checks.audit.episode_checks import is_agents
from rlcore.config import RlConfig
from rlcore.errors import CanaryError
from rlcore.seeding import shuffled
from rlcore.training.audit.reference_impl import EQUAL, is_trainable
from rlcore.types import Prompt, Rollout, ScoredRollout

if TYPE_CHECKING:
    from rlcore.components import Components

Groups = Sequence[Sequence[ScoredRollout]]
_CYCLE = 1000  # length of the dataset cycle
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
    yield Discrepancy(summary="the prompts of the iteration", expected=shown[0], actual=shown[1], fix=_FIX)


def row_errors(groups: Groups, rows: Mapping[str, Prompt]) -> Iterator[Discrepancy]:
    """Yield a discrepancy if a rollout has another reference answer or other columns than its prompt's row, by id."""
    for item in (item for group in groups for item in group):
        found = item.rollout.prompt
        own = rows.get(found.prompt_id, found)
        for name in ("reference", "columns", "task", "dataset"):
            wanted, given = (repr(getattr(prompt, name))[:80] for prompt in (own, found))
            if getattr(own, name) != getattr(found, name):
                summary, fix = f"the {name} of prompt {found.prompt_id!r}", "rewards would be those of another prompt"
                yield Discrepancy(summary=summary, expected=wanted, actual=given, rollout=item, fix=fix)
                return


def version_errors(groups: Groups, iteration: int, *, staleness: int) -> Iterator[Discrepancy]:
    """Yield a discrepancy if a rollout was sampled with other weights than those ``staleness`` updates before."""
    wanted = max(0, iteration - 1 - staleness)
    for item in (item for group in groups for item in group):
        for sample in item.rollout.samples:
            if sample.policy_version != wanted:
                found, fix = str(sample.policy_version), "check when weights are loaded, and how far rollouts are ahead"
                summary = "the policy version of a rollout"
                yield Discrepancy(summary=summary, expected=str(wanted), actual=found, rollout=item, fix=fix)
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
            summary, shown = (
                f"the {what} of dynamic sampling, by their rewards",
                (", ".join(expected), ", ".join(found)),
            )
            yield Discrepancy(summary=summary, expected=shown[0][:80] or "none", actual=shown[1][:80], fix=_FIX)
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
        yield Discrepancy(summary="groups", expected=str(len(scheduled)), actual=str(len(groups)), fix=_FIX)
        return
    own = {prompt.prompt_id for prompt in scheduled}
    for number, (group, prompt) in enumerate(zip(groups, scheduled, strict=True), start=1):
        ids = {item.rollout.prompt.prompt_id for item in group}
        others = ids - {prompt.prompt_id}
        is_fresh = config.sampling.dynamic_sampling_rounds > 0 and len(ids) == 1 and not ids & own
        if others and not is_fresh:
            shown = f"one prompt, {prompt.prompt_id!r}", f"{', '.join(map(repr, sorted(ids)[:4]))}"
            yield Discrepancy(summary=f"group {number}", expected=shown[0], actual=shown[1], rollout=group[0], fix=_FIX)
            return
        if len({item.rollout.prompt.token_ids for item in group}) > 1 and not is_agents(group):
            yield Discrepancy(summary=f"the prompt of group {number} has different tokens", rollout=group[0], fix=_FIX)
            return
    everyone = [item for group in groups for item in group]
    if len({id(item.rollout) for item in everyone}) < len(everyone):
        yield Discrepancy(summary="a rollout is in the training batch twice", fix=_FIX)
    missing = len(groups) * config.group_size - len(everyone)
    if max(map(len, groups), default=0) > config.group_size or missing > num_missing:
        found, wanted = ", ".join(str(len(group)) for group in groups), f"{config.group_size} rollouts each"
        yield Discrepancy(summary="the sizes of the groups", expected=wanted, actual=found[:80], fix=_FIX)


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
