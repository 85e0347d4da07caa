"""A rollout from a text, and a judging server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rlcore.types import FinishReason, Prompt, Rollout
from tests.judge_server import Server, by_length, serving


def make_rollout(
    text: str, reference: str = "", *, finish_reason: FinishReason = "stop", num_tokens: int = 1
) -> Rollout:
    return Rollout(
        prompt=Prompt(prompt_id="p", messages=(), token_ids=(1, 2), reference=reference, task="test"),
        completion_ids=(3,) * num_tokens,
        sampler_logprobs=(-1.0,) * num_tokens,
        loss_mask=(True,) * num_tokens,
        policy_version=0,
        finish_reason=finish_reason,
        text=text,
    )


@pytest.fixture
def judged() -> Iterator[tuple[Server, str]]:
    with serving(by_length) as made:
        yield made
