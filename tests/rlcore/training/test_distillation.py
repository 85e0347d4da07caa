"""On-policy distillation: the KL to a teacher as the reward of each token, from rollouts to steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import LlamaForCausalLM

from rlcore.algorithms.resolve import resolve_algorithm
from rlcore.config import KlConfig, RlConfig
from rlcore.errors import ConfigError
from rlcore.rewards.mix import WeightedReward
from rlcore.text.packing import TokenSequence
from rlcore.training.experience import Experience, build_experience
from rlcore.training.learner import Learner
from rlcore.training.scoring_models import ScoringModels
from tests import strategies
from tests.learners import update_config, weights_of
from tests.reference.losses import one_at_a_time

TAUGHT = KlConfig(coefficient=1.0, apply_to="reward")


def config(**settings: object) -> RlConfig:
    return strategies.rl_config("distil", **({"kl": TAUGHT, "update": update_config(), "group_size": 1} | settings))


def experience_of(policy: LlamaForCausalLM, teacher: LlamaForCausalLM, seed: int = 3) -> Experience:
    """That of some completions which no reward judges."""
    rollouts = [item.rollout for group in strategies.random_groups(policy, seed, num_prompts=6) for item in group]
    scores = WeightedReward(())(rollouts)
    assert [score.value for score in scores] == [0.0] * len(rollouts)
    groups = [
        [replace(strategies.scored_rollout(0.0), rollout=rollout, score=score)]
        for rollout, score in zip(rollouts, scores, strict=True)
    ]
    judges = ScoringModels(policy=policy, reference=teacher, critic=None, temperature=1.0, tokens_per_microbatch=64)
    return build_experience(
        groups,
        resolve_algorithm(config()),
        judges,
        kl=TAUGHT,
        kl_coefficient=1.0,
        truncated="score",
        need_old_logprobs=True,
    )


def test_the_advantage_of_a_token_is_how_much_more_the_teacher_expects_it() -> None:
    policy, teacher = strategies.tiny_llama(seed=0), strategies.tiny_llama(seed=1)
    experience = experience_of(policy, teacher)
    assert experience.metrics["groups/zero_signal"] == 0.0
    for sample in experience.samples:
        sequence = TokenSequence(prompt_ids=sample.prompt_ids, completion_ids=sample.completion_ids)
        theirs, own = (one_at_a_time(model, sequence).detach() for model in (teacher, policy))
        torch.testing.assert_close(sample.advantages, (theirs - own) * sample.loss_mask, rtol=1e-3, atol=1e-4)


def test_where_the_teacher_is_the_policy_every_advantage_is_exactly_0_and_nothing_moves() -> None:
    policy, teacher = strategies.tiny_llama(), strategies.tiny_llama()
    experience = experience_of(policy, teacher)
    assert all(not bool(sample.advantages.any()) for sample in experience.samples)
    assert (experience.metrics["kl/ref"], experience.metrics["groups/zero_signal"]) == (0.0, 1.0)
    learner = Learner(policy, None, algorithm=resolve_algorithm(config()), config=config())
    before = weights_of(policy).clone()
    stats = learner.update(experience.samples, seed=0)
    assert not stats.moved
    assert torch.equal(weights_of(policy), before)


def test_a_step_makes_what_the_teacher_expects_more_likely() -> None:
    policy, teacher = strategies.tiny_llama(seed=0), strategies.tiny_llama(seed=1)
    experience = experience_of(policy, teacher)
    learner = Learner(policy, None, algorithm=resolve_algorithm(config()), config=config(learning_rate=1e-3))
    learner.update(experience.samples, seed=0)
    changes, advantages = [], []
    for sample in experience.samples:
        sequence = TokenSequence(prompt_ids=sample.prompt_ids, completion_ids=sample.completion_ids)
        changes.append((one_at_a_time(policy, sequence).detach() - sample.old_logprobs)[sample.loss_mask])
        advantages.append(sample.advantages[sample.loss_mask])
    assert float(torch.cat(changes) @ torch.cat(advantages)) > 0.0


@pytest.mark.parametrize("kl", [KlConfig(), KlConfig(coefficient=1.0)])
def test_without_a_kl_in_the_reward_tokens_have_no_reward_of_their_own(kl: KlConfig) -> None:
    with pytest.raises(ConfigError, match="distil trains on per-token rewards") as caught:
        resolve_algorithm(config(kl=kl))
    assert caught.value.where == "kl.apply_to"
