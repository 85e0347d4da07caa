"""Right programs in the habits of those who write them are paid, and wrong ones are not."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from rlcore.config import RewardTerm
from rlcore.rewards import RewardResources, build_rewards
from rlcore.types import Rollout
from tests.rlcore.rewards.honest_programs import TASKS
from tests.rlcore.sandbox.conftest import require_bubblewrap


@pytest.mark.parametrize("task", TASKS)
def test_a_program_is_paid_if_it_is_right(make_rollout: Callable[..., Rollout], task: str) -> None:
    require_bubblewrap()
    reference, right, wrong = TASKS[task]
    programs = [(f"right: {name}", code, 1.0) for name, code in right.items()]
    programs += [(f"wrong: {name}", code, 0.0) for name, code in wrong.items()]
    rollouts = [make_rollout(f"```python\n{code}\n```", json.dumps(reference)) for _, code, _ in programs]
    with build_rewards([RewardTerm(kind="code")], resources=RewardResources()) as reward:
        scores = reward(rollouts)
    misjudged = [
        (name, score.value, score.error)
        for (name, _, wanted), score in zip(programs, scores, strict=True)
        if score.value != wanted
    ]
    assert misjudged == []
