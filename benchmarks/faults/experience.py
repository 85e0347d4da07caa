"""Faults between completions and training samples: rewards, advantages, masks, tokens."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.faults.lab import Inject, Patches, replaced
from benchmarks.faults.models import SUMS, start
from rlcore.loop import rollouts as rollouts_module
from rlcore.loop import update as update_module
from rlcore.rewards.length import LengthReward
from rlcore.rewards.math_answer import MathReward
from rlcore.rewards.mix import WeightedReward
from rlcore.sampling.native import NativeSampler
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import Rollout, Score, ScoredRollout, TrainingSample

Scores = Sequence[Score]
Samples = Sequence[TrainingSample]


def scores(change: Callable[[list[Score]], Scores], *, since: int = 1) -> Inject:
    """Change the scores of the training reward from a batch on."""

    def inject(patch: Patches) -> None:
        calls: list[int] = []

        def score_groups(reward: Any, groups: Sequence[Sequence[Rollout]]) -> list[list[ScoredRollout]]:
            calls.append(1)
            flat = [rollout for group in groups for rollout in group]
            made = list(reward(flat))
            found = iter(change(made) if len(calls) >= since else made)
            return [[ScoredRollout(rollout=r, score=next(found)) for r in group] for group in groups]

        patch.set(rollouts_module, "score_groups", score_groups)

    return inject


def valued(turn: Callable[[float], float]) -> Callable[[list[Score]], Scores]:
    """Change the total of each score."""
    return lambda them: [dataclasses.replace(s, value=None if s.value is None else turn(s.value)) for s in them]


def whole(turn: Callable[[float], float]) -> Callable[[list[Score]], Scores]:
    """Change the total and the terms of each score."""
    return lambda them: [
        dataclasses.replace(
            s, value=None if s.value is None else turn(s.value), terms={n: turn(v) for n, v in s.terms.items()}
        )
        for s in them
    ]


def term(owner: type, change: Callable[[Scores], Scores], *, since: int = 1) -> Inject:
    """Change the values of one reward term from a call on."""

    def inject(patch: Patches) -> None:
        calls: list[int] = []

        def call(self: Any, rollouts: Sequence[Rollout]) -> Any:
            calls.append(1)
            found = old(self, rollouts)
            return list(change(found)) if len(calls) >= since else found

        old = patch.set(owner, "__call__", call)

    return inject


def shuffled(them: list[Any]) -> list[Any]:
    """Shuffle the values."""
    return random.Random(len(them)).sample(them, len(them))


def moved_on(them: list[Any]) -> list[Any]:
    """Replace each value by the previous one."""
    return [them[-1], *them[:-1]]


def without_gate(old: Any, self: WeightedReward, row: Any) -> Score:
    """Compute the total with wrong weights."""
    made = old(self, row)
    return dataclasses.replace(
        made, value=sum(part.weight * made.terms.get(part.reward.name, 0.0) * 1.5 for part in self.terms)
    )


def samples(change: Callable[[list[TrainingSample]], Samples]) -> Inject:
    """Change the training samples of an iteration."""

    def build(old: Any, *arguments: Any, **settings: Any) -> Any:
        made = old(*arguments, **settings)
        return dataclasses.replace(made, samples=tuple(change(list(made.samples))))

    return replaced(update_module, "build_experience", build)


def each(**turns: Callable[[Any], Any]) -> Callable[[list[TrainingSample]], Samples]:
    """Change some fields of every sample."""
    return lambda them: [
        dataclasses.replace(s, **{name: turn(getattr(s, name)) for name, turn in turns.items()}) for s in them
    ]


def of_the_one_before(name: str) -> Callable[[list[TrainingSample]], Samples]:
    """Use the field of the previous sample, its first number for every token."""

    def change(them: list[TrainingSample]) -> Samples:
        firsts = [float(getattr(one, name)[0]) for one in them]
        return [
            dataclasses.replace(one, **{name: torch.full_like(getattr(one, name), firsts[place - 1])})
            for place, one in enumerate(them)
        ]

    return change


def mask_at(place: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Mask one token that is trained, and train one that is masked."""

    def change(mask: torch.Tensor) -> torch.Tensor:
        return mask if len(mask) < 2 else mask.index_fill(0, torch.tensor([place % len(mask)]), False)

    return change


def rollouts(change: Callable[[list[Rollout]], Sequence[Rollout]]) -> Inject:
    """Change the rollouts that the engine returns."""
    return replaced(NativeSampler, "_rollouts", lambda old, *given: iter(change(list(old(*given)))))


def mapped(change: Callable[[Rollout], Rollout]) -> Callable[[list[Rollout]], list[Rollout]]:
    """Apply the same change to each rollout."""
    return lambda them: [change(one) for one in them]


def without_end(one: Rollout) -> Rollout:
    """Return a finished completion without its EOS as truncated."""
    if one.finish_reason != "stop" or len(one.completion_ids) < 2:
        return one
    cut = {name: getattr(one, name)[:-1] for name in ("completion_ids", "sampler_logprobs", "loss_mask")}
    return dataclasses.replace(one, finish_reason="length", **cut)


def texts_moved_on(them: list[Rollout]) -> list[Rollout]:
    """Give each rollout the text of the previous one."""
    return [dataclasses.replace(one, text=them[place - 1].text) for place, one in enumerate(them)]


def another_template(patch: Patches) -> None:
    """Render with another template than the one that rendered the prompts."""
    start()  # which also renders when it is made
    calls: list[int] = []

    def render(self: ChatTokenizer, messages: Any, *, tools: str = "") -> tuple[int, ...]:
        calls.append(1)
        ids: tuple[int, ...] = old(self, messages, tools=tools)
        return ids if len(calls) <= len(SUMS) + 10 else (*ids[1:], ids[-1])

    old = patch.set(ChatTokenizer, "render_prompt", render)


EXPERIENCE: dict[str, tuple[str, Inject]] = {
    "the reward's sign is swapped": ("grpo", scores(whole(lambda value: -value))),
    "the total's sign is swapped, the parts are right": ("grpo", scores(valued(lambda value: -value))),
    "1 - reward": ("grpo", scores(whole(lambda value: 1.0 - value))),
    "random rewards": ("grpo", scores(whole(lambda _: random.random()))),
    "rewards moved on by one rollout": ("grpo", scores(moved_on)),
    "rewards shuffled": ("grpo", scores(shuffled)),
    "rewards shuffled from the tenth iteration on": ("grpo", scores(shuffled, since=10)),
    "a constant reward": ("grpo", scores(whole(lambda _: 0.5))),
    "rewards are halved": ("grpo", scores(valued(lambda value: 0.5 * value))),
    "rewards off by a tenth": ("ppo", scores(valued(lambda value: value + 0.1))),
    "the mix forgets weights": ("grpo", replaced(WeightedReward, "_total", without_gate)),
    "the verifier calls right wrong, from the start": (
        "grpo",
        term(MathReward, whole(lambda value: 1.0 - value)),  # type: ignore[arg-type]
    ),
    "the verifier calls right wrong, later": (
        "grpo",
        term(MathReward, whole(lambda value: 1.0 - value), since=30),  # type: ignore[arg-type]
    ),
    "the verifier says 0 to all, later": ("grpo", term(MathReward, whole(lambda _: 0.0), since=30)),  # type: ignore[arg-type]
    "the verifier says 1 to all, later": ("grpo", term(MathReward, whole(lambda _: 1.0), since=30)),  # type: ignore[arg-type]
    "a term gives its scores in another order": ("grpo", term(LengthReward, moved_on)),  # type: ignore[arg-type]
    "texts belong to other tokens": ("grpo", rollouts(texts_moved_on)),
    "advantages negated": ("grpo", samples(each(advantages=lambda value: -value))),
    "advantages moved on by one": ("grpo", samples(of_the_one_before("advantages"))),
    "advantages all zero": ("grpo", samples(each(advantages=torch.zeros_like))),
    "advantages ten times as large": ("grpo", samples(each(advantages=lambda value: 10.0 * value))),
    "advantages not divided by the spread": ("grpo", samples(each(advantages=lambda value: 0.4 * value))),
    "advantages are their signs": ("rloo", samples(each(advantages=torch.sign))),
    "advantages of ppo negated": ("ppo", samples(each(advantages=lambda value: -value))),
    "advantages of ppo not whitened": ("ppo", samples(each(advantages=lambda value: value + 0.5))),
    "returns of the critic moved on by one": ("ppo", samples(of_the_one_before("returns"))),
    "returns of the critic are its values": (
        "ppo",
        samples(lambda them: [dataclasses.replace(one, returns=one.values.clone()) for one in them]),
    ),
    "values all zero": ("ppo", samples(each(values=torch.zeros_like))),
    "old log-probabilities moved by one token": ("grpo, 2 epochs", samples(each(old_logprobs=lambda v: v.roll(1)))),
    "the engine's log-probabilities moved by one token": ("grpo", samples(each(sampler_logprobs=lambda v: v.roll(1)))),
    "the reference's log-probabilities are the policy's": (
        "ppo",
        samples(lambda them: [dataclasses.replace(one, ref_logprobs=one.old_logprobs.clone()) for one in them]),
    ),
    "the reference's log-probabilities are zero": (
        "grpo, KL in the loss",
        samples(each(ref_logprobs=torch.zeros_like)),
    ),
    "half of the samples are dropped": ("grpo", samples(lambda them: them[::2])),
    "samples stand twice": ("grpo", samples(lambda them: [*them, *them])),
    "the end is masked out of the loss": ("grpo", samples(each(loss_mask=mask_at(-1)))),
    "the first token is masked out of the loss": ("grpo", samples(each(loss_mask=mask_at(0)))),
    "a token in the middle is masked out of the loss": ("grpo", samples(each(loss_mask=mask_at(1)))),
    "the engine masks the first token": (
        "grpo",
        rollouts(mapped(lambda one: dataclasses.replace(one, loss_mask=(False, *one.loss_mask[1:])))),
    ),
    "the engine masks the end": (
        "grpo",
        rollouts(mapped(lambda one: dataclasses.replace(one, loss_mask=(*one.loss_mask[:-1], False)))),
    ),
    "the end is dropped, and the completion called cut": ("grpo", rollouts(mapped(without_end))),
    "a cut completion is called ended": (
        "grpo",
        rollouts(mapped(lambda one: dataclasses.replace(one, finish_reason="stop"))),
    ),
    "tokens are moved by one in the samples": (
        "grpo",
        samples(each(completion_ids=lambda ids: (*ids[1:], ids[-1]))),
    ),
    "prompts are another sample's": (
        "grpo",
        samples(
            lambda them: [
                dataclasses.replace(one, prompt_ids=them[place - 4].prompt_ids) for place, one in enumerate(them)
            ]
        ),
    ),
    "cut completions are trained on all the same": (
        "dapo, cut answers masked",
        samples(lambda them: [*them, *them[:1]]),
    ),
    "another chat template than the prompts', after a while": ("grpo", another_template),
}
