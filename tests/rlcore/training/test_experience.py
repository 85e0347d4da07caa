"""From scored rollouts to samples: who enters the baseline, what the penalties do to rewards, returns and whitening."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from rlcore.algorithms.advantages import lay_out_episodes
from rlcore.algorithms.resolve import with_constants
from rlcore.algorithms.table import ALGORITHMS
from rlcore.config import KlConfig
from rlcore.errors import NonFiniteError, TrainingError
from rlcore.models.heads import ScalarHeadModel
from rlcore.models.policy import score_sequences
from rlcore.text.packing import TokenSequence
from rlcore.training.experience import Experience, build_experience, token_rewards
from rlcore.training.scoring_models import ScoringModels
from rlcore.types import ScoredRollout
from tests import strategies
from tests.reference import advantages as reference

POLICY = strategies.tiny_llama()
REFERENCE = strategies.tiny_llama(seed=9)
IN_REWARD = KlConfig(coefficient=0.1, apply_to="reward")


def build(groups: Sequence[Sequence[ScoredRollout]], algorithm: str = "grpo", **settings: Any) -> Experience:
    """Experience without reference and critic, unless given."""
    judges = ScoringModels(
        policy=POLICY,
        reference=settings.pop("reference", None),
        critic=settings.pop("critic", None),
        temperature=settings.pop("temperature", 1.0),
        tokens_per_microbatch=64,
        bootstrap_truncated=settings.pop("bootstrap_truncated", False),
    )
    neutral = {"kl": KlConfig(), "kl_coefficient": 0.0, "truncated": "score", "need_old_logprobs": False}
    return build_experience(groups, ALGORITHMS[algorithm], judges, **(neutral | settings))


def group_of(*values: float | None, **fields: Any) -> list[ScoredRollout]:
    """Completions of one prompt with the given scores."""
    return [strategies.scored_rollout(value, **fields) for value in values]


def first_advantages(experience: Experience) -> list[float]:
    """The advantage of each sample's first token."""
    return [float(sample.advantages[0]) for sample in experience.samples]


def test_the_group_advantages_of_the_worked_example_reach_the_samples() -> None:
    # R = [1.0, 0.8, 0.4, 0.2]: [1.2649, 0.6325, -0.6325, -1.2649], the same for all three tokens.
    experience = build([group_of(1.0, 0.8, 0.4, 0.2)])
    assert first_advantages(experience) == pytest.approx([1.2649, 0.6325, -0.6325, -1.2649], abs=5e-5)
    assert all(len(set(sample.advantages.tolist())) == 1 for sample in experience.samples)
    assert [len(sample.advantages) for sample in experience.samples] == [3] * 4


@pytest.mark.parametrize("value", [None, math.nan])
def test_an_unscored_rollout_leaves_baseline_and_loss_and_is_counted(value: float | None) -> None:
    experience = build([group_of(1.0, value, 0.2, 0.6)])
    assert first_advantages(experience) == first_advantages(build([group_of(1.0, 0.2, 0.6)]))
    assert experience.metrics["reward/errors"] == 1.0
    assert experience.metrics["reward/mean"] == pytest.approx(0.6)


def test_unscored_is_not_a_reward_of_zero() -> None:
    # With 0.0 in place of None the baseline would be 0.5 and the first advantage positive.
    assert first_advantages(build([group_of(1.0, 1.0, None)])) == [0.0, 0.0]
    assert first_advantages(build([group_of(1.0, 1.0, 0.0)]))[0] > 0.5


@pytest.mark.parametrize("reward", [math.inf, -math.inf, 1e200])  # the variance of 1.0 and 1e200 is infinite
def test_an_infinite_reward_is_refused_with_its_prompt(reward: float) -> None:
    with pytest.raises(NonFiniteError, match=f"reward of a completion is {re.escape(str(reward))}") as caught:
        build([group_of(1.0, reward)])
    assert "(1, 2)" in caught.value.where


@pytest.mark.parametrize(
    ("group", "settings", "what", "fix"),
    [
        (group_of(None, None), {}, "2 of 2 have no score, for example: the grader died", "read the errors"),
        (
            group_of(1.0, 0.0, None, finish_reason="length"),
            {"truncated": "mask"},
            "3 of 3 were cut at sampling.max_new_tokens, and truncated_completions = 'mask'",
            "raise sampling.max_new_tokens",
        ),
        (
            group_of(1.0, loss_mask=(False, False, False)),
            {},
            "they hold no token of the policy",
            "check the loss masks",
        ),
        ([], {}, "the engine completed none", "see the reason in the log line"),
    ],
)
def test_an_iteration_without_any_usable_rollout_is_an_error_that_names_the_reason(
    group: list[ScoredRollout], settings: dict[str, str], what: str, fix: str
) -> None:
    with pytest.raises(TrainingError, match=re.escape(f"rollouts can be trained on: {what}")) as caught:
        build([group], **settings)
    assert caught.value.fix.startswith(fix)


def test_a_completion_without_a_token_of_the_policy_is_left_out() -> None:
    nothing_own = strategies.scored_rollout(0.0, loss_mask=(False, False, False))
    assert first_advantages(build([[*group_of(1.0, 0.2), nothing_own]])) == pytest.approx([1.0, -1.0], abs=1e-5)


def test_the_end_token_is_an_action_whatever_its_value() -> None:
    # 0 is the padding id of packed rows, 2 an end of sequence: the mask is what the sampler says, never a comparison.
    endings = [strategies.scored_rollout(value, completion_ids=(4, end)) for value, end in ((1.0, 0), (0.0, 2))]
    assert [sample.loss_mask.tolist() for sample in build([endings]).samples] == [[True, True], [True, True]]


def truncated_group() -> list[ScoredRollout]:
    """Two completions that ended and one that was cut by the limit."""
    return [*group_of(1.0, 0.0), *group_of(0.8, finish_reason="length")]


@pytest.mark.parametrize(
    ("setting", "rewards"), [("score", [1.0, 0.0, 0.8]), ("zero", [1.0, 0.0, 0.0]), ("mask", [1.0, 0.0])]
)
def test_a_truncated_completion_is_scored_zeroed_or_masked(setting: str, rewards: list[float]) -> None:
    experience = build([truncated_group()], truncated=setting)
    assert first_advantages(experience) == pytest.approx(reference.group_normalized(rewards), abs=1e-4)
    assert experience.metrics["completion/truncated"] == pytest.approx(1 / 3)


def test_truncation_is_what_the_engine_says_not_the_absence_of_an_end_token_or_the_length() -> None:
    # The stopped completion is longer than the cut one, and none of them ends with any particular token.
    long_stop = strategies.scored_rollout(0.0, completion_ids=(3,) * 9, finish_reason="stop")
    short_cut = strategies.scored_rollout(1.0, completion_ids=(3,), finish_reason="length")
    experience = build([[long_stop, short_cut, *group_of(0.5)]], truncated="mask")
    assert [len(sample.completion_ids) for sample in experience.samples] == [9, 3]


def test_the_reward_less_the_kl_of_the_worked_example_is_one_half() -> None:
    # R = 0.8, KL = 0.05, beta = 6: 0.8 - 6 * 0.05 = 0.5. The KL stands on two tokens, 0.02 + 0.03.
    penalties = [torch.tensor([-6 * 0.02, -6 * 0.03], dtype=torch.float64)]
    reward = torch.tensor([0.0, 0.8], dtype=torch.float64)
    episodes = lay_out_episodes(
        [reward], [0], penalties, [torch.zeros(2)], [torch.tensor([True, True])], torch.zeros(1)
    )
    assert float(episodes.rewards[0]) == pytest.approx(0.5)
    # The score joins the penalty of the last token: -0.18 + 0.8.
    assert episodes.token_rewards[0].tolist() == pytest.approx([-0.12, 0.62])


def test_the_score_goes_to_the_last_token_of_the_policy_and_rows_are_padded() -> None:
    masks = [torch.tensor([True, True, False]), torch.tensor([True])]
    zeros = [torch.zeros(len(mask)) for mask in masks]
    penalties = [each.double() for each in zeros]
    first = strategies.scored_rollout(1.0, loss_mask=(True, True, False))
    rewards = [token_rewards(item, "score") for item in (first, strategies.scored_rollout(2.0, completion_ids=(3,)))]
    episodes = lay_out_episodes(rewards, [4, 4], penalties, zeros, masks, torch.zeros(2))
    assert episodes.token_rewards.tolist() == [[0.0, 1.0, 0.0], [2.0, 0.0, 0.0]]
    assert episodes.mask.tolist() == [[True, True, False], [True, False, False]]
    assert episodes.group.tolist() == [4, 4]


TWO_TURNS = {"completion_ids": (3, 4, 5, 6, 2), "loss_mask": (True, True, False, True, True)}


def with_turns(value: float, *turn_rewards: float, **fields: Any) -> ScoredRollout:
    """A rollout of two turns, with what was earned in each."""
    item = strategies.scored_rollout(value, **(TWO_TURNS | fields))
    return dataclasses.replace(item, score=dataclasses.replace(item.score, turn_rewards=turn_rewards))


def test_what_a_turn_earned_comes_at_its_last_token_and_what_is_left_at_the_end() -> None:
    assert token_rewards(with_turns(1.0), "score").tolist() == [0.0, 0.0, 0.0, 0.0, 1.0]
    assert token_rewards(with_turns(1.0, 0.25, 0.5), "score").tolist() == [0.0, 0.25, 0.0, 0.0, 0.75]
    cut = with_turns(1.0, 0.25, 0.5, finish_reason="length")
    assert token_rewards(cut, "score").tolist() == [0.0, 0.25, 0.0, 0.0, 0.75]
    assert token_rewards(cut, "zero").tolist() == [0.0] * 5


@pytest.mark.parametrize("value", [0.0, 1.0, -0.5])
def test_a_cut_completion_that_is_worth_nothing_keeps_no_rewards_of_its_turns_whatever_it_scored(value: float) -> None:
    cut = with_turns(value, 0.5, -0.5, finish_reason="length")
    assert token_rewards(cut, "zero").tolist() == [0.0] * 5
    assert token_rewards(with_turns(value, 0.5, -0.5), "zero").tolist() == [0.0, 0.5, 0.0, 0.0, value - 0.5]


def test_a_group_sees_the_whole_reward_whenever_it_was_earned() -> None:
    experience = build([[with_turns(1.0, 0.5, 0.5), with_turns(1.0), with_turns(0.0, 0.5, -0.5)]])
    assert first_advantages(experience) == first_advantages(
        build([[with_turns(1.0), with_turns(1.0), with_turns(0.0)]])
    )


def test_rewards_for_another_number_of_turns_are_refused() -> None:
    with pytest.raises(TrainingError, match="3 turn rewards, but its rollout has 2 turns"):
        build([[with_turns(1.0, 0.5, 0.25, 0.25)]])


class Half(torch.nn.Linear):
    """A critic's head that values every token at one half."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.full((*hidden.shape[:-1], 1), 0.5)


def test_the_advantages_of_a_multi_turn_episode_are_those_of_its_own_tokens_from_rollout_to_sample() -> None:
    # The worked example of gae: five tokens of the policy, 16 of tool output between them, V = 0.5, reward 1 at the
    # end, lam 0.95: A = 0.5 * 0.95^4 = 0.41 at the first token, and A + V = returns. With half of the reward at the
    # end of the third turn already, delta = [0, 0, 0.5, 0, 0], so A = 0.5 * 0.95^2 = 0.45.
    mask = (True, *(False,) * 6, True, *(False,) * 5, True, *(False,) * 5, True, True)
    critic = ScalarHeadModel(POLICY.model, Half(24, 1, bias=False))
    late = strategies.scored_rollout(1.0, completion_ids=(3,) * len(mask), loss_mask=mask)
    assert len(late.rollout.turns) == 4
    early = dataclasses.replace(late, score=dataclasses.replace(late.score, turn_rewards=(0.0, 0.0, 0.5, 0.5)))
    experience = build([[late, early]], "ppo", critic=critic)
    first, second = (sample.returns - sample.values for sample in experience.samples)
    assert float(first[0]) == pytest.approx(0.41, abs=0.005)
    assert float(first[0]) == pytest.approx(0.5 * 0.95**4, abs=1e-6)
    assert float(second[0]) == pytest.approx(0.5 * 0.95**2, abs=1e-6)
    rewards = [0.0] * (len(mask) - 1) + [1.0]
    expected = reference.gae(rewards, [0.5] * len(mask), mask, gamma=1.0, lam=0.95)
    assert first.tolist() == pytest.approx(expected, abs=1e-6)
    assert first[~torch.tensor(mask)].tolist() == [0.0] * 16


def kl_of(item: ScoredRollout, temperature: float = 1.0) -> float:
    """The summed log-ratio of policy to reference over a completion's own tokens."""
    rollout = item.rollout
    sequence = TokenSequence(prompt_ids=rollout.prompt.token_ids, completion_ids=rollout.completion_ids)
    policy, ref = (
        score_sequences(model, [sequence], tokens_per_microbatch=64, temperature=temperature)[0]
        for model in (POLICY, REFERENCE)
    )
    return float((policy - ref)[torch.tensor(rollout.loss_mask)].sum())


def mixed_group() -> list[ScoredRollout]:
    """Three completions of different lengths, one with tool output in the middle."""
    return [
        strategies.scored_rollout(1.0, completion_ids=(3, 4, 5, 6), loss_mask=(True, False, True, True)),
        strategies.scored_rollout(0.5, completion_ids=(7, 2)),
        strategies.scored_rollout(0.0, completion_ids=(9,)),
    ]


def test_kl_in_the_reward_lowers_each_reward_by_beta_times_its_log_ratio() -> None:
    group = mixed_group()
    experience = build([group], reference=REFERENCE, kl=IN_REWARD, kl_coefficient=0.3, temperature=0.8)
    kls = [kl_of(item, temperature=0.8) for item in group]
    assert max(map(abs, kls)) > 0.5
    rewards = [float(item.score.value or 0.0) - 0.3 * kl for item, kl in zip(group, kls, strict=True)]
    assert first_advantages(experience) == pytest.approx(reference.group_normalized(rewards), abs=1e-3)
    assert experience.mean_kl == pytest.approx(reference.mean(kls), rel=1e-4)
    assert experience.metrics["kl/ref"] > 0.0


def test_kl_in_the_loss_leaves_the_rewards_alone_and_hands_over_the_reference() -> None:
    experience = build(
        [mixed_group()], reference=REFERENCE, kl=KlConfig(coefficient=0.3, apply_to="loss"), kl_coefficient=0.3
    )
    assert first_advantages(experience) == pytest.approx(reference.group_normalized([1.0, 0.5, 0.0]), abs=1e-4)
    assert all(bool(sample.ref_logprobs.all()) for sample in experience.samples)
    assert "kl/ref" not in experience.metrics


def test_old_log_probabilities_are_those_of_the_tempered_policy_and_only_when_needed() -> None:
    group = mixed_group()
    for sample, item in zip(build([group], need_old_logprobs=True, temperature=0.7).samples, group, strict=True):
        sequence = TokenSequence(prompt_ids=(1, 2), completion_ids=item.rollout.completion_ids)
        expected = score_sequences(POLICY, [sequence], tokens_per_microbatch=64, temperature=0.7)[0]
        torch.testing.assert_close(sample.old_logprobs, expected, rtol=1e-5, atol=1e-5)
    assert not any(bool(sample.old_logprobs.any()) for sample in build([group]).samples)


def ppo_experience(groups: Sequence[Sequence[ScoredRollout]]) -> Experience:
    """PPO's experience with a critic that says something and KL in the reward."""
    critic = ScalarHeadModel.with_random_head(REFERENCE, torch.Generator().manual_seed(0))
    return build(groups, "ppo", critic=critic, reference=REFERENCE, kl=IN_REWARD, kl_coefficient=0.1)


def test_returns_are_the_raw_advantages_plus_the_values() -> None:
    group = mixed_group()
    for sample, item in zip(ppo_experience([group]).samples, group, strict=True):
        own = sample.loss_mask.tolist()
        sequence = TokenSequence(prompt_ids=(1, 2), completion_ids=sample.completion_ids)
        policy, ref = (score_sequences(m, [sequence], tokens_per_microbatch=64)[0] for m in (POLICY, REFERENCE))
        rewards = (-0.1 * (policy - ref)).tolist()
        rewards[-1] += float(item.score.value or 0.0)
        raw = reference.gae(rewards, sample.values.tolist(), own, gamma=1.0, lam=0.95)
        expected = [a + v for a, v in zip(raw, sample.values.tolist(), strict=True)]
        assert sample.returns.tolist() == pytest.approx(expected, abs=1e-4)
        assert bool(sample.values.any())


def test_the_advantages_of_ppo_are_whitened_over_the_policys_own_tokens() -> None:
    experience = ppo_experience([mixed_group(), strategies.random_groups(POLICY, 0, num_prompts=1)[0]])
    own = torch.cat([sample.advantages[sample.loss_mask] for sample in experience.samples])
    assert float(own.mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(own.std(unbiased=False)) == pytest.approx(1.0, abs=1e-5)
    assert float(experience.samples[0].advantages[1]) == 0.0  # tool output
    assert "value/explained_variance" in experience.metrics


def test_group_advantages_are_not_whitened() -> None:
    experience = build([group_of(10.0, 0.0), group_of(1.0, 0.0, prompt_ids=(5,))], "dr_grpo")
    assert first_advantages(experience) == [5.0, -5.0, 0.5, -0.5]


def test_the_metrics_say_what_happened_to_rewards_lengths_and_groups() -> None:
    groups = [
        group_of(1.0, 0.0, completion_ids=(3, 4, 5, 6)),
        group_of(0.5, 0.5, prompt_ids=(7,), completion_ids=(3, 4), finish_reason="length"),
    ]
    metrics = build(groups).metrics
    expected = {
        "reward/mean": 0.5,
        "reward/std": 0.125**0.5,  # deviations 0.5, -0.5, 0, 0: mean square 0.125
        "reward/errors": 0.0,
        "completion/length": 3.0,
        "completion/truncated": 0.5,
        "groups/zero_signal": 0.5,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)


@pytest.mark.parametrize(
    ("setting", "mean", "std"), [("score", 0.6, 0.432), ("zero", 1 / 3, 0.4714), ("mask", 0.5, 0.5)]
)
def test_the_mean_reward_is_what_the_completions_are_paid(setting: str, mean: float, std: float) -> None:
    metrics = build([truncated_group()], truncated=setting).metrics  # 1.0, 0.0 and 0.8, which was cut
    assert (metrics["reward/mean"], metrics["reward/std"]) == (pytest.approx(mean), pytest.approx(std, abs=1e-3))


def test_the_entropy_of_the_policy_that_sampled_is_estimated_over_every_token_of_its_own() -> None:
    # -(-0.5 - 1.5) and -(-1.0) over three tokens of a silent and a mixed group: 3.0 / 3; tool output does not count.
    two, one = {"completion_ids": (3, 4, 5), "loss_mask": (True, False, True)}, {"completion_ids": (3,)}
    groups = [
        [strategies.scored_rollout(1.0, sampler_logprobs=(-0.5, -9.0, -1.5), **two)],
        [strategies.scored_rollout(1.0, prompt_ids=(7,), sampler_logprobs=(-1.0,), **one)],
    ]
    assert build(groups).metrics["entropy/sampled"] == pytest.approx(1.0)


def test_a_group_that_truncation_makes_equal_counts_as_without_signal() -> None:
    groups = [[*group_of(0.0), *group_of(1.0, finish_reason="length")]]
    assert build(groups, truncated="zero").metrics["groups/zero_signal"] == 1.0
    assert build(groups, truncated="score").metrics["groups/zero_signal"] == 0.0


def test_the_critics_returns_may_have_a_lambda_of_their_own() -> None:
    # lam_value 1, gamma 1, no penalties: every return is the reward to come, here the score itself.
    critic = ScalarHeadModel.with_random_head(REFERENCE, torch.Generator().manual_seed(0))
    judges = ScoringModels(policy=POLICY, reference=None, critic=critic, temperature=1.0, tokens_per_microbatch=64)
    settings: dict[str, Any] = {"kl": KlConfig(), "kl_coefficient": 0.0, "truncated": "score"}
    rows = {lam: with_constants(ALGORITHMS["ppo"], {"lam": 0.5, "lam_value": lam}) for lam in (None, 1.0)}
    built = {
        lam: build_experience([group_of(0.7, 0.1)], row, judges, need_old_logprobs=False, **settings).samples
        for lam, row in rows.items()
    }
    for plain, own, score in zip(built[None], built[1.0], (0.7, 0.1), strict=True):
        assert own.returns.tolist() == pytest.approx([score] * 3, abs=1e-6)
        assert plain.returns.tolist() != pytest.approx([score] * 3, abs=1e-3)
        assert torch.equal(own.advantages, plain.advantages)


def test_only_what_the_engine_cut_goes_on_with_the_value_of_its_last_state() -> None:
    critic = ScalarHeadModel.with_random_head(REFERENCE, torch.Generator().manual_seed(0))
    group = [*group_of(0.5), *group_of(0.5, finish_reason="length", completion_ids=(8, 9))]
    plain, going_on = (build([group], "ppo", critic=critic, bootstrap_truncated=on).samples for on in (False, True))
    assert torch.equal(plain[0].returns, going_on[0].returns)
    states = critic.backbone.base_model(torch.tensor([(1, 2, 8, 9)])).last_hidden_state
    next_value = float(critic.head(states[0, -1]).detach())
    assert abs(next_value) > 0.1
    # gamma 1, lam 0.95: the last return gains V_next whole, the one before it 0.95 of it.
    gain = (going_on[1].returns - plain[1].returns).tolist()
    assert gain == pytest.approx([0.95 * next_value, next_value], abs=1e-5)
