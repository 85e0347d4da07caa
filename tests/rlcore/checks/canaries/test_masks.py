"""The mask canary is silent on whole completions and names what is broken in others."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from rlcore.checks.canaries import mask_canary, sample_canary
from rlcore.errors import CanaryError
from rlcore.types import Rollout
from tests import strategies

EOS = frozenset({2, 7})


def rollout(**changes: object) -> Rollout:
    made = strategies.scored_rollout(1.0, completion_ids=(3, 4, 2)).rollout
    return dataclasses.replace(made, **changes)


SOUND = [
    rollout(),
    rollout(completion_ids=(3, 4, 7)),
    rollout(finish_reason="length", completion_ids=(3, 4, 5)),
    rollout(completion_ids=(7, 4, 2), loss_mask=(True, False, True)),
    rollout(completion_ids=(2, 2, 2), loss_mask=(True, False, True)),  # an EOS inside tool output is not trained on
    rollout(finish_reason="length", completion_ids=(2, 4, 3), loss_mask=(True, False, True)),
    rollout(completion_ids=(3, 2, 4), loss_mask=(True, False, True), num_sampled=2),  # an agent's stop strings
    rollout(finish_reason="length", completion_ids=(3, 4, 2)),  # a call for which there was no turn left
]


def test_whole_rollouts_pass() -> None:
    mask_canary(SOUND, EOS)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (rollout(loss_mask=(True, True, False)), "EOS token is masked out"),
        (rollout(completion_ids=(3, 4, 5)), "its last token is no EOS"),
        (rollout(loss_mask=(True, True)), r"different lengths \[2, 3\]"),
        (rollout(sampler_logprobs=(-1.0,)), r"different lengths \[1, 3\]"),
        (rollout(loss_mask=(False, False, False)), "no token is trained on"),
        (rollout(loss_mask=(True, False, True)), "turn 1 precedes tool output, but does not end with EOS"),
        (rollout(completion_ids=(3, 2, 2)), "turn 1 continues after its EOS"),
        (
            rollout(finish_reason="length", completion_ids=(2, 4, 3), loss_mask=(True, False, False)),
            "ends with tokens that are not the policy's",
        ),
        (
            rollout(completion_ids=(3, 2, 4), loss_mask=(True, False, True), num_sampled=3),
            "2 tokens are trained on, and 3",
        ),
        (rollout(completion_ids=(), loss_mask=(), sampler_logprobs=()), "no token is trained on"),
    ],
)
def test_a_broken_rollout_is_found_among_whole_ones(broken: Rollout, message: str) -> None:
    with pytest.raises(CanaryError, match=rf"(?s)1 of 9 rollouts.*{message}"):
        mask_canary([*SOUND, broken], EOS)


BRANCH = rollout(completion_ids=(3, 4, 5, 2), loss_mask=(False, False, True, True), sampler_logprobs=(0.0,) * 4)


@pytest.mark.parametrize(
    ("branch", "message"),
    [
        (BRANCH, ""),
        (rollout(loss_mask=(False, False, False)), ""),  # not trained, as all its answers are another sample's
        (rollout(loss_mask=(True, True, False)), "EOS token is masked out"),
        (rollout(branches=(BRANCH,)), "a branch has branches of its own"),
        (rollout(prompt=dataclasses.replace(BRANCH.prompt, prompt_id="other")), "is of another prompt"),
    ],
)
def test_every_sample_of_an_episode_is_checked(branch: Rollout, message: str) -> None:
    episode = rollout(branches=(BRANCH, branch))
    if not message:
        mask_canary([*SOUND, episode], EOS)
        return
    with pytest.raises(CanaryError, match=rf"(?s)1 of 9 rollouts.*{message}"):
        mask_canary([*SOUND, episode], EOS)


def test_whole_training_samples_pass_and_broken_ones_are_found() -> None:
    sample = strategies.random_samples(0, num_prompts=1, group_size=1)[0]
    whole = torch.ones_like(sample.loss_mask)
    sample = dataclasses.replace(sample, completion_ids=(3,) * len(whole), loss_mask=whole)
    ends = dataclasses.replace(sample, completion_ids=(*sample.completion_ids[:-1], 2))
    sample_canary([sample, ends], EOS)
    masked = ends.loss_mask.clone()
    masked[-1] = False
    masked[0] = len(masked) > 1
    shorter = dataclasses.replace(sample)
    object.__setattr__(shorter, "old_logprobs", sample.old_logprobs[:-1])  # past the check of axes, which tests have
    faults = {
        "EOS token is masked out|no token": dataclasses.replace(ends, loss_mask=masked),
        "no token is trained on": dataclasses.replace(sample, loss_mask=torch.zeros_like(sample.loss_mask)),
        "different lengths": shorter,
    }
    for message, broken in faults.items():
        with pytest.raises(CanaryError, match=rf"(?s)1 of 2 training samples.*{message}"):
            sample_canary([sample, broken], EOS)
