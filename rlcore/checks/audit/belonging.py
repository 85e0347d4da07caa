"""Do an iteration's prompts have their turn, and does every rollout stand in the group of its prompt?

Exact on purpose: whose turn it is, is worked out a second time from the seed, and everything else is told by ids.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence

from rlcore.checks.audit.finding import Discrepancy
from rlcore.config import RlConfig
from rlcore.errors import CanaryError
from rlcore.seeding import shuffled
from rlcore.types import Prompt, Rollout, ScoredRollout

Groups = Sequence[Sequence[ScoredRollout]]
_CYCLE = 1000  # places after which the mix of data sets repeats
_FIX = "look at how prompts are chosen, and at how rollouts are put together again after they were sampled and scored"


def expected_prompts(
    prompts: Sequence[Prompt], shares: Mapping[str, float], config: RlConfig, *, seed: int, iteration: int
) -> list[str] | None:
    """The ids of the prompts whose turn it is; None where turns depend on what a run has shown (``revisit`` < 1)."""
    if config.sampling.zero_signal_keep_prob < 1.0:
        return None
    count, names = config.prompts_per_iteration, tuple[str, ...]([""])
    pools: dict[str, Sequence[Prompt]] = {"": prompts}
    if len(shares) > 1:
        names = _mix(tuple(shares.items()))
        pools = {name: [prompt for prompt in prompts if prompt.dataset == name] for name in shares}
    found = []
    for place in range((iteration - 1) * count, iteration * count):
        rounds, rest = divmod(place, len(names))
        name = names[rest]
        pool = pools[name]
        epoch, number = divmod(rounds * names.count(name) + names[:rest].count(name), len(pool))
        order = _order(len(pool), seed, name, epoch)
        found.append(pool[order[number]].prompt_id)
    return found


def prompt_errors(asked: Sequence[Prompt], expected: Sequence[str] | None) -> Iterator[Discrepancy]:
    """True if the prompts that were asked are those whose turn it is."""
    if expected is None or [prompt.prompt_id for prompt in asked] == list(expected):
        return
    shown = [", ".join(map(repr, ids[:4])) for ids in (list(expected), [prompt.prompt_id for prompt in asked])]
    yield Discrepancy(summary="the prompts whose turn it is", expected=shown[0], actual=shown[1], fix=_FIX)


def group_errors(groups: Groups, asked: Sequence[Prompt], config: RlConfig, *, allowed: int) -> Iterator[Discrepancy]:
    """Errors of the groups of an iteration; ``allowed``: how many rollouts failed, and may be missing."""
    if len(groups) != len(asked):
        yield Discrepancy(summary="groups", expected=str(len(asked)), actual=str(len(groups)), fix=_FIX)
        return
    own = {prompt.prompt_id for prompt in asked}
    for number, (group, prompt) in enumerate(zip(groups, asked, strict=True), start=1):
        ids = {item.rollout.prompt.prompt_id for item in group}
        others = ids - {prompt.prompt_id}
        is_fresh = config.sampling.dynamic_sampling_rounds > 0 and len(ids) == 1 and not ids & own
        if others and not is_fresh:
            shown = f"one prompt, {prompt.prompt_id!r}", f"{', '.join(map(repr, sorted(ids)[:4]))}"
            yield Discrepancy(summary=f"group {number}", expected=shown[0], actual=shown[1], rollout=group[0], fix=_FIX)
            return
        if len({item.rollout.prompt.token_ids for item in group}) > 1:
            yield Discrepancy(summary=f"the prompt of group {number} has different tokens", rollout=group[0], fix=_FIX)
            return
    everyone = [item for group in groups for item in group]
    if len({id(item.rollout) for item in everyone}) < len(everyone):
        yield Discrepancy(summary="a rollout stands twice among those to train on", fix=_FIX)
    missing = len(groups) * config.group_size - len(everyone)
    if max(map(len, groups), default=0) > config.group_size or missing > allowed:
        found, wanted = ", ".join(str(len(group)) for group in groups), f"{config.group_size} rollouts each"
        yield Discrepancy(summary="the sizes of the groups", expected=wanted, actual=found[:80], fix=_FIX)


def require_groups(groups: Sequence[Sequence[object]], prompts: Sequence[Prompt], num_samples: int) -> None:
    """An engine gives a group of each prompt, in their order, with as many completions as were asked for.

    Raises:
        CanaryError: another number of groups or of completions, or completions of another prompt.
    """
    if len(groups) != len(prompts) or any(len(group) != num_samples for group in groups):
        sizes = ", ".join(str(len(group)) for group in groups)[:80]
        raise CanaryError(
            f"the engine was asked for {len(prompts)} groups of {num_samples}, and gave {sizes}", fix=_FIX
        )
    for number, (group, prompt) in enumerate(zip(groups, prompts, strict=True), start=1):
        others = {item.prompt.prompt_id for item in group if isinstance(item, Rollout)} - {prompt.prompt_id}
        if others:
            raise CanaryError(
                f"group {number} is of prompt {prompt.prompt_id!r}, and has completions of {sorted(others)[0]!r}",
                fix=_FIX,
            )


@functools.lru_cache(maxsize=8)
def _mix(shares: tuple[tuple[str, float], ...]) -> tuple[str, ...]:
    """The data set of each place: the one whose count is furthest below its share, the first of equals."""
    total, counts, names = sum(share for _, share in shares), dict.fromkeys(dict(shares), 0), list[str]()
    for place in range(1, _CYCLE + 1):
        name = max(counts, key=lambda each: place * dict(shares)[each] / total - counts[each])
        counts[name] += 1
        names.append(name)
    return tuple(names)


@functools.lru_cache(maxsize=16)
def _order(count: int, seed: int, name: str, epoch: int) -> list[int]:
    return shuffled(count, seed, *(("prompts", name, epoch) if name else ("prompts", epoch)))
