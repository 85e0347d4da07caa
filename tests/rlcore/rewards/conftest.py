"""A rollout from a text, a judging server, and one set of grader processes for tests that need no own ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from rlcore.rewards.grader_pool import GraderPool
from rlcore.types import FinishReason, Prompt, Rollout
from tests.judge_server import Server, by_length, serving

MakeRollout = Callable[..., Rollout]
DEADLINE = 2.0


@pytest.fixture(scope="session")
def make_rollout() -> MakeRollout:
    def make(text: str, reference: str = "", *, finish_reason: FinishReason = "stop", num_tokens: int = 1) -> Rollout:
        return Rollout(
            prompt=Prompt(prompt_id="p", messages=(), token_ids=(1, 2), reference=reference, task="test"),
            completion_ids=(3,) * num_tokens,
            sampler_logprobs=(-1.0,) * num_tokens,
            loss_mask=(True,) * num_tokens,
            policy_version=0,
            finish_reason=finish_reason,
            text=text,
        )

    return make


@pytest.fixture(scope="session")
def math_pool() -> Iterator[GraderPool]:
    with GraderPool("math", timeout_seconds=DEADLINE, num_workers=2) as pool:
        yield pool


@pytest.fixture
def judged() -> Iterator[tuple[Server, str]]:
    with serving(by_length) as made:
        yield made
