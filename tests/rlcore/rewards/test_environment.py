"""The reward of an environment is what it said at the end of an episode."""

from __future__ import annotations

from rlcore.config import RewardTerm
from rlcore.rewards.table import RewardResources, build_rewards
from rlcore.types import Message, Prompt, Rollout


def test_the_environments_word_is_the_reward_and_without_one_nothing_is_scored() -> None:
    prompt = Prompt(
        prompt_id="p", messages=(Message(role="user", content="?"),), token_ids=(1,), reference="", task="t"
    )
    rollouts = [
        Rollout(
            prompt=prompt,
            completion_ids=(2,),
            sampler_logprobs=(-1.0,),
            loss_mask=(True,),
            policy_version=0,
            finish_reason="stop",
            text="",
            environment_reward=value,
        )
        for value in (0.5, None)
    ]
    reward = build_rewards([RewardTerm(kind="environment", weight=2.0)], resources=RewardResources())
    worth, silent = reward(rollouts)
    assert (worth.value, dict(worth.terms)) == (1.0, {"environment": 0.5})
    assert (silent.value, silent.error) == (None, "environment: neither environment nor agent gave a reward")
