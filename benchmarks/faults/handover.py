"""Faults of grouping and transfer: groups and their prompts, and samples between the audit and the gradient."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.faults.experience import Samples, each, of_the_one_before
from benchmarks.faults.lab import Inject, Patches, replaced
from rlcore.distributed import rank_pool
from rlcore.loop import rollouts as rollouts_module
from rlcore.loop.prompt_schedule import PromptSchedule
from rlcore.sampling.native import NativeSampler
from rlcore.training import experience, learner
from rlcore.training.learner import Learner
from rlcore.training.local_learner import LocalLearner
from rlcore.types import TrainingSample

Groups = list[list[Any]]


def engine_groups(change: Callable[[Groups], Groups]) -> Inject:
    """Change the groups of the engine, if it samples several completions per group."""

    def sample(old: Any, self: Any, prompts: Any, params: Any, **more: Any) -> Groups:
        made = old(self, prompts, params, **more)
        return change(made) if params.num_samples > 1 else made

    return replaced(NativeSampler, "sample", sample)


def scored_groups(change: Callable[[Groups], Groups]) -> Inject:
    """Change the groups after scoring."""
    return replaced(rollouts_module, "score_groups", lambda old, *given: change(old(*given)))


def turned_over(groups: Groups) -> Groups:
    """Return the first of each group, then the second of each, and so on."""
    return [list(column) for column in zip(*groups, strict=True)]


def one_moved_on(groups: Groups) -> Groups:
    """Move the last completion of each group to the next one."""
    return [[*group[:-1], groups[place - 1][-1]] for place, group in enumerate(groups)]


def turns(choose: Callable[[Any, int, list[Any]], list[Any]]) -> Inject:
    """Change the prompts of an iteration, given the schedule, its number, and the correct prompts."""
    return replaced(PromptSchedule, "prompts_for", lambda old, self, number: choose(self, number, old(self, number)))


def at_most_half(them: Any, number: int, right: list[Any]) -> list[Any]:
    """Draw prompts from the first half of the file only."""
    half, count = them._prompts[: len(them._prompts) // 2], len(right)
    return [half[(count * number + place) % len(half)] for place in range(count)]


def as_in_the_file(them: Any, number: int, right: list[Any]) -> list[Any]:
    """Draw prompts in the order of the file, repeatedly."""
    count = len(right)
    return [them._prompts[(count * (number - 1) + place) % len(them._prompts)] for place in range(count)]


def learner_gets(change: Callable[[list[TrainingSample]], Samples]) -> Inject:
    """Change the samples after the audit has checked them, on the learner's side."""
    return replaced(
        LocalLearner, "update", lambda old, self, samples, **more: old(self, tuple(change(list(samples))), **more)
    )


def update_gets(change: Callable[[list[TrainingSample]], Samples]) -> Inject:
    """Change the samples at the start of an update."""
    return replaced(Learner, "update", lambda old, self, samples, **more: old(self, change(list(samples)), **more))


def minibatches(change: Callable[[list[Any]], list[Any]]) -> Inject:
    """Change the minibatches of the samples."""
    return replaced(learner, "split_by_group", lambda old, *given, **more: change(old(*given, **more)))


def tokens_of_the_one_before(them: list[TrainingSample]) -> Samples:
    """Give each sample the tokens and the mask of the previous one if it is as long."""
    pairs = zip(them, [them[-1], *them[:-1]], strict=True)
    return [
        dataclasses.replace(one, completion_ids=other.completion_ids)
        if len(one.completion_ids) == len(other.completion_ids)
        else one
        for one, other in pairs
    ]


def last_masked(mask: torch.Tensor) -> torch.Tensor:
    """Drop the last token."""
    return torch.cat([mask[:-1], torch.zeros(1, dtype=torch.bool)])


class Late:
    """Learner that trains on the samples of the previous call."""

    def __init__(self) -> None:
        self.kept: list[TrainingSample] = []

    def __call__(self, them: list[TrainingSample]) -> Samples:
        given, self.kept = self.kept or them, them
        return given


def wire(change: Callable[[list[TrainingSample]], Samples], *, of_the_second: bool = False) -> Inject:
    """Change the samples on their way to the ranks, or only to the second one."""

    def inject(patch: Patches) -> None:
        def encode(value: Any) -> bytes:
            method, arguments, settings = value
            if method != "update":
                return old(value)
            return old((method, (tuple(change(list(arguments[0]))), *arguments[1:]), settings))

        old = rank_pool.encode
        if not of_the_second:
            patch.set(rank_pool, "encode", encode)
            return

        def ask(self: rank_pool.RankPool, method: str, *arguments: Any, **settings: Any) -> Any:
            end = self.transport._ends[1]
            send, others = end.send_bytes, encode((method, arguments, settings))
            end.send_bytes = lambda data: send(others)
            try:
                return asked(self, method, *arguments, **settings)
            finally:
                end.send_bytes = send

        asked = patch.set(rank_pool.RankPool, "ask", ask)

    return inject


TWO_RANKS = "grpo, two ranks"

HANDOVER: dict[str, tuple[str, Inject]] = {
    "groups are mixed over prompts, by the engine": ("grpo", engine_groups(turned_over)),
    "groups are mixed over prompts, when they are scored": ("grpo", scored_groups(turned_over)),
    "one completion of each group stands in the next": ("grpo", scored_groups(one_moved_on)),
    "groups are numbered one completion late": (
        "grpo",
        replaced(
            experience,
            "lay_out_episodes",
            lambda old, rewards, group, *rest: old(rewards, [group[-1], *group[:-1]], *rest),
        ),
    ),
    "groups are half as large": ("grpo", engine_groups(lambda groups: [group[: len(group) // 2] for group in groups])),
    "a group is lost after it was scored": ("grpo", scored_groups(lambda groups: groups[:-1])),
    "a group has its first completion twice": (
        "grpo",
        scored_groups(lambda groups: [[group[0], *group[:-1]] for group in groups]),
    ),
    "the same prompts for ever": ("grpo", turns(lambda them, number, right: list(them._prompts[: len(right)]))),
    "half of the prompts never come": ("grpo", turns(at_most_half)),
    "prompts come in the order of the file": ("grpo", turns(as_in_the_file)),
    "one prompt stands in the place of another": ("grpo", turns(lambda them, number, right: [*right[:-1], right[0]])),
    "the learner gets advantages moved on by one sample": ("grpo", learner_gets(of_the_one_before("advantages"))),
    "the learner gets masks without the last token": ("grpo", learner_gets(each(loss_mask=last_masked))),
    "the learner gets half of the samples": ("grpo", learner_gets(lambda them: them[::2])),
    "the learner gets the samples of the update before": ("grpo", lambda patch: learner_gets(Late())(patch)),
    "an update begins with tokens of another sample": ("grpo", update_gets(tokens_of_the_one_before)),
    "an update begins with advantages of the other sign": ("grpo", update_gets(each(advantages=torch.neg))),
    "an update begins with references of zero": (
        "grpo, KL in the loss",
        update_gets(each(ref_logprobs=torch.zeros_like)),
    ),
    "an update begins with old log-probabilities of zero": (
        "grpo, 2 epochs",
        update_gets(each(old_logprobs=torch.zeros_like)),
    ),
    "an update begins with returns that are values": (
        "ppo",
        update_gets(lambda them: [dataclasses.replace(one, returns=one.values.clone()) for one in them]),
    ),
    "the last group of a minibatch is lost": (
        "grpo, 2 epochs",
        minibatches(lambda made: [each[:-4] or each for each in made]),
    ),
    "the first minibatch is learned twice": ("grpo, 2 epochs", minibatches(lambda made: [made[0], *made[:-1]])),
    "a minibatch has advantages of its neighbours": (
        "grpo, 2 epochs",
        minibatches(lambda made: [list(of_the_one_before("advantages")(batch)) for batch in made]),
    ),
    "ranks get advantages in half precision": (TWO_RANKS, wire(each(advantages=lambda value: value.half().float()))),
    "ranks get masks without the last token": (TWO_RANKS, wire(each(loss_mask=last_masked))),
    "the second rank gets other samples": (TWO_RANKS, wire(of_the_one_before("advantages"), of_the_second=True)),
}
