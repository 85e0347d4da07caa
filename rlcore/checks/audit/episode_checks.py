"""Audit of episodes with several samples: each belongs to its episode, and every sampled token is trained once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rlcore.checks.audit.discrepancy import Discrepancy
from rlcore.seeding import shuffled
from rlcore.training.audit.reference_impl import samples_of
from rlcore.types import ScoredRollout, TrainingSample

_FIX = "check how the calls of an agent become branches, and how branches become training samples"


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
        yield Discrepancy(summary="samples to train on", expected=str(len(parts)), actual=str(len(samples)), fix=_FIX)
        return
    trained = [0] * len(kept)
    for number, ((episode, group), sample) in enumerate(zip(parts, samples, strict=True)):
        if (sample.episode, sample.group) != (episode, group):
            wanted, found = f"{episode} of group {group}", f"{sample.episode} of group {sample.group}"
            summary, item = f"the episode of sample {number}", kept[episode][1]
            yield Discrepancy(summary=summary, expected=wanted, actual=found, rollout=item, fix=_FIX)
            return
        trained[episode] += int(sample.loss_mask.sum())
    for count, (_, item) in zip(trained, kept, strict=True):
        sampled = item.rollout.num_sampled
        if count != sampled and (item.rollout.branches or sampled is not None):
            wanted = "a count of the sampled ones" if sampled is None else f"the {sampled} that were sampled"
            found = f"{count}, in {len(item.rollout.samples)} samples"
            summary = "the tokens of an episode that are trained on"
            yield Discrepancy(summary=summary, expected=wanted, actual=found, rollout=item, fix=_FIX)
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
