"""From scored rollouts to samples: rewards, baselines, truncation, turns and branches."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaForCausalLM

from rlcore.algorithms.advantages import lay_out_episodes
from rlcore.algorithms.table import ALGORITHMS, resolve_algorithm, with_constants
from rlcore.config import KlConfig, RlConfig
from rlcore.errors import NonFiniteError, TrainingError
from rlcore.models.heads import ScalarHeadModel
from rlcore.models.policy import score_sequences
from rlcore.rewards.mix import WeightedReward
from rlcore.text.packing import TokenSequence
from rlcore.training.experience import Experience, token_rewards
from rlcore.training.learner import Learner
from rlcore.training.minibatches import split_by_group
from rlcore.types import ScoredRollout, TrainingSample
from tests import strategies
from tests.learners import assert_same, experience_of, make_learner, update_config, weights_of
from tests.reference import advantages as reference

POLICY = strategies.tiny_llama()
REFERENCE = strategies.tiny_llama(seed=9)
IN_REWARD = KlConfig(coefficient=0.1, apply_to="reward")


def build(groups: Sequence[Sequence[ScoredRollout]], algorithm: str = "grpo", **settings: Any) -> Experience:
    """Experience of the policy, without old log-probabilities unless said otherwise."""
    return experience_of(groups, ALGORITHMS[algorithm], POLICY, **({"need_old_logprobs": False} | settings))


def group_of(*values: float | None, **fields: Any) -> list[ScoredRollout]:
    return [strategies.scored_rollout(value, **fields) for value in values]


def first_advantages(experience: Experience) -> list[float]:
    return [float(sample.advantages[0]) for sample in experience.samples]


def test_group_advantages_reach_samples() -> None:
    # R = [1.0, 0.8, 0.4, 0.2]: [1.2649, 0.6325, -0.6325, -1.2649], the same for all three tokens.
    experience = build([group_of(1.0, 0.8, 0.4, 0.2)])
    assert first_advantages(experience) == pytest.approx([1.2649, 0.6325, -0.6325, -1.2649], abs=5e-5)
    assert all(len(set(sample.advantages.tolist())) == 1 for sample in experience.samples)
    assert [len(sample.advantages) for sample in experience.samples] == [3] * 4


@pytest.mark.parametrize("value", [None, math.nan])
def test_unscored_rollout_is_left_out_and_counted(value: float | None) -> None:
    experience = build([group_of(1.0, value, 0.2, 0.6)])
    assert first_advantages(experience) == first_advantages(build([group_of(1.0, 0.2, 0.6)]))
    assert experience.metrics["reward/errors"] == 1.0
    assert experience.metrics["reward/mean"] == pytest.approx(0.6)


@pytest.mark.parametrize("reward", [math.inf, -math.inf, 1e200])  # the variance of 1.0 and 1e200 is infinite
def test_infinite_reward_is_refused(reward: float) -> None:
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
def test_iteration_without_usable_rollout_names_reason(
    group: list[ScoredRollout], settings: dict[str, str], what: str, fix: str
) -> None:
    with pytest.raises(TrainingError, match=re.escape(f"rollouts can be trained on: {what}")) as caught:
        build([group], **settings)
    assert caught.value.fix.startswith(fix)


def test_completion_without_own_token_is_left_out() -> None:
    nothing_own = strategies.scored_rollout(0.0, loss_mask=(False, False, False))
    assert first_advantages(build([[*group_of(1.0, 0.2), nothing_own]])) == pytest.approx([1.0, -1.0], abs=1e-5)


def test_eos_is_an_action_whatever_its_id() -> None:
    # 0 is the padding id of packed rows, 2 an end of sequence: the mask is what the sampler says, never a comparison.
    endings = [strategies.scored_rollout(value, completion_ids=(4, end)) for value, end in ((1.0, 0), (0.0, 2))]
    assert [sample.loss_mask.tolist() for sample in build([endings]).samples] == [[True, True], [True, True]]


def truncated_group() -> list[ScoredRollout]:
    return [*group_of(1.0, 0.0), *group_of(0.8, finish_reason="length")]


@pytest.mark.parametrize(
    ("setting", "rewards"), [("score", [1.0, 0.0, 0.8]), ("zero", [1.0, 0.0, 0.0]), ("mask", [1.0, 0.0])]
)
def test_truncated_completion_is_scored_zeroed_or_masked(setting: str, rewards: list[float]) -> None:
    experience = build([truncated_group()], truncated=setting)
    assert first_advantages(experience) == pytest.approx(reference.group_normalized(rewards), abs=1e-4)
    found = [experience.metrics[name] for name in ("reward/mean", "reward/std", "completion/truncated")]
    assert found == pytest.approx([reference.mean(rewards), reference.population_std(rewards), 1 / 3])


def test_truncation_is_read_from_finish_reason() -> None:
    # The stopped completion is longer than the cut one, and none of them ends with any particular token.
    long_stop = strategies.scored_rollout(0.0, completion_ids=(3,) * 9, finish_reason="stop")
    short_cut = strategies.scored_rollout(1.0, completion_ids=(3,), finish_reason="length")
    experience = build([[long_stop, short_cut, *group_of(0.5)]], truncated="mask")
    assert [len(sample.completion_ids) for sample in experience.samples] == [9, 3]


def test_reward_with_kl_penalty_by_hand() -> None:
    # R = 0.8, KL = 0.05, beta = 6: 0.8 - 6 * 0.05 = 0.5. The KL stands on two tokens, 0.02 + 0.03.
    penalties = [torch.tensor([-6 * 0.02, -6 * 0.03], dtype=torch.float64)]
    reward = torch.tensor([0.0, 0.8], dtype=torch.float64)
    episodes = lay_out_episodes(
        [reward], [0], penalties, [torch.zeros(2)], [torch.tensor([True, True])], torch.zeros(1)
    )
    assert float(episodes.rewards[0]) == pytest.approx(0.5)
    # The score joins the penalty of the last token: -0.18 + 0.8.
    assert episodes.token_rewards[0].tolist() == pytest.approx([-0.12, 0.62])


def test_score_goes_to_last_own_token() -> None:
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
    item = strategies.scored_rollout(value, **(TWO_TURNS | fields))
    return replace(item, score=replace(item.score, turn_rewards=turn_rewards))


def test_turn_rewards_come_at_last_token_of_turn() -> None:
    assert token_rewards(with_turns(1.0), "score").tolist() == [0.0, 0.0, 0.0, 0.0, 1.0]
    assert token_rewards(with_turns(1.0, 0.25, 0.5), "score").tolist() == [0.0, 0.25, 0.0, 0.0, 0.75]
    cut = with_turns(1.0, 0.25, 0.5, finish_reason="length")
    assert token_rewards(cut, "score").tolist() == [0.0, 0.25, 0.0, 0.0, 0.75]
    assert token_rewards(cut, "zero").tolist() == [0.0] * 5


def test_group_sees_sum_of_turn_rewards() -> None:
    experience = build([[with_turns(1.0, 0.5, 0.5), with_turns(1.0), with_turns(0.0, 0.5, -0.5)]])
    assert first_advantages(experience) == first_advantages(
        build([[with_turns(1.0), with_turns(1.0), with_turns(0.0)]])
    )


def test_wrong_number_of_turn_rewards_is_refused() -> None:
    with pytest.raises(TrainingError, match="3 turn rewards, but its rollout has 2 turns"):
        build([[with_turns(1.0, 0.5, 0.25, 0.25)]])


def mixed_group() -> list[ScoredRollout]:
    return [
        strategies.scored_rollout(1.0, completion_ids=(3, 4, 5, 6), loss_mask=(True, False, True, True)),
        strategies.scored_rollout(0.5, completion_ids=(7, 2)),
        strategies.scored_rollout(0.0, completion_ids=(9,)),
    ]


def test_old_logprobs_have_temperature() -> None:
    group = mixed_group()
    for sample, item in zip(build([group], need_old_logprobs=True, temperature=0.7).samples, group, strict=True):
        sequence = TokenSequence(prompt_ids=(1, 2), completion_ids=item.rollout.completion_ids)
        expected = score_sequences(POLICY, [sequence], tokens_per_microbatch=64, temperature=0.7)[0]
        torch.testing.assert_close(sample.old_logprobs, expected, rtol=1e-5, atol=1e-5)
    assert not any(bool(sample.old_logprobs.any()) for sample in build([group]).samples)


def test_metrics_of_experience_by_hand() -> None:
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


def test_sampled_entropy_by_hand() -> None:
    # -(-0.5 - 1.5) and -(-1.0) over three tokens of a silent and a mixed group: 3.0 / 3; tool output does not count.
    two, one = {"completion_ids": (3, 4, 5), "loss_mask": (True, False, True)}, {"completion_ids": (3,)}
    groups = [
        [strategies.scored_rollout(1.0, sampler_logprobs=(-0.5, -9.0, -1.5), **two)],
        [strategies.scored_rollout(1.0, prompt_ids=(7,), sampler_logprobs=(-1.0,), **one)],
    ]
    assert build(groups).metrics["entropy/sampled"] == pytest.approx(1.0)


def test_truncation_may_silence_group() -> None:
    groups = [[*group_of(0.0), *group_of(1.0, finish_reason="length")]]
    assert build(groups, truncated="zero").metrics["groups/zero_signal"] == 1.0
    assert build(groups, truncated="score").metrics["groups/zero_signal"] == 0.0


def test_returns_have_own_lambda() -> None:
    # lam_value 1, gamma 1, no penalties: every return is the reward to come, here the score itself.
    critic = ScalarHeadModel.with_random_head(REFERENCE, torch.Generator().manual_seed(0))
    rows = {lam: with_constants(ALGORITHMS["ppo"], {"lam": 0.5, "lam_value": lam}) for lam in (None, 1.0)}
    built = {
        lam: experience_of([group_of(0.7, 0.1)], row, POLICY, critic=critic, need_old_logprobs=False).samples
        for lam, row in rows.items()
    }
    for plain, own, score in zip(built[None], built[1.0], (0.7, 0.1), strict=True):
        assert own.returns.tolist() == pytest.approx([score] * 3, abs=1e-6)
        assert plain.returns.tolist() != pytest.approx([score] * 3, abs=1e-3)
        assert torch.equal(own.advantages, plain.advantages)


def test_truncated_completion_bootstraps_value() -> None:
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


def four_branches() -> list[ScoredRollout]:
    """Rewards 1, 0, 0, 0, where the first episode has four samples of 3, 2, 1 and 2 tokens."""
    branches = [
        strategies.scored_rollout(None, prompt_ids=(1, 2, 9), completion_ids=ids) for ids in ((6, 7), (8,), (9, 4))
    ]
    first = strategies.forked(strategies.scored_rollout(1.0), *branches)
    return [first, *(strategies.scored_rollout(0.0, completion_ids=(5, number)) for number in (3, 4, 6))]


def test_samples_of_episode_share_advantage() -> None:
    # Mean 1/4, population std sqrt(1/4 - 1/16) = 0.4330: 0.75 / 0.4330 = 1.7320 and -0.25 / 0.4330 = -0.5773.
    samples = build([four_branches()]).samples
    assert [sample.episode for sample in samples] == [0, 0, 0, 0, 1, 2, 3]
    assert [sample.group for sample in samples] == [0] * 7
    assert all(len(set(sample.advantages.tolist())) == 1 for sample in samples)
    advantages = [float(sample.advantages[0]) for sample in samples]
    assert advantages == pytest.approx([1.7320] * 4 + [-0.5773] * 3, abs=2e-4)


def test_metrics_count_episodes() -> None:
    metrics = build([four_branches(), [strategies.scored_rollout(0.5), strategies.scored_rollout(0.5)]]).metrics
    assert metrics["reward/mean"] == pytest.approx((1.0 + 0.5 + 0.5) / 6)
    assert metrics["groups/zero_signal"] == 0.5
    assert metrics["completion/length"] == pytest.approx((8 + 3 * 2 + 2 * 3) / 6)


def test_kl_of_episode_is_sum_over_samples() -> None:
    whole = strategies.scored_rollout(1.0, completion_ids=(3, 4, 5, 6))
    other = strategies.scored_rollout(0.0, completion_ids=(7, 2))
    known = {"reference": strategies.tiny_llama(seed=9), "kl": IN_REWARD, "kl_coefficient": 0.3}
    unsplit, split = (
        build([[whole, other]], **known),
        build([[split_at(whole, 1, 3), other]], **known),
    )
    assert split.mean_kl == pytest.approx(unsplit.mean_kl, rel=1e-5)
    assert split.metrics["kl/ref"] == pytest.approx(unsplit.metrics["kl/ref"], rel=1e-5)
    assert (len(unsplit.samples), len(split.samples)) == (2, 4)
    assert split.num_episodes == unsplit.num_episodes == 2
    assert float(split.samples[0].advantages[-1]) == pytest.approx(float(unsplit.samples[0].advantages[0]), rel=1e-5)


def split_at(item: ScoredRollout, *cuts: int) -> ScoredRollout:
    """The same tokens as samples with disjoint masks: the last piece is the episode, the earlier ones its branches.

    Every sample has all tokens up to its own, so that the policy reads the same before each of them.
    """
    rollout, ends = item.rollout, [0, *cuts, len(item.rollout.completion_ids)]
    pieces = []
    for begin, end in itertools.pairwise(ends):
        mask = tuple(own and place >= begin for place, own in enumerate(rollout.loss_mask[:end]))
        kept: dict[str, Any] = {
            "completion_ids": rollout.completion_ids[:end],
            "sampler_logprobs": rollout.sampler_logprobs[:end],
        }
        pieces.append(replace(item, rollout=replace(rollout, loss_mask=mask, **kept)))
    return strategies.forked(pieces[-1], *pieces[:-1])


@st.composite
def unsplit_and_split(draw: st.DrawFn) -> tuple[list[list[ScoredRollout]], list[list[ScoredRollout]]]:
    """Two groups of three episodes of one sample each, some with tool output; and the same, cut at random places."""
    groups = strategies.random_groups(strategies.tiny_llama(), draw(st.integers(0, 1000)), num_prompts=2, max_tokens=6)
    whole, split = list[list[ScoredRollout]](), list[list[ScoredRollout]]()
    for group in groups:
        whole.append([])
        split.append([])
        for item in group:
            length = len(item.rollout.completion_ids)
            mask = (*draw(st.lists(st.booleans(), min_size=length - 1, max_size=length - 1)), True)
            masked = replace(item, rollout=replace(item.rollout, loss_mask=mask))
            cuts = draw(st.sets(st.integers(1, length - 1), max_size=3)) if length > 1 else set()
            whole[-1].append(masked)
            split[-1].append(split_at(masked, *sorted(cuts)) if cuts else masked)
    return whole, split


@pytest.mark.parametrize("name", ["grpo", "dapo", "dr_grpo", "rloo", "gspo"])
@settings(max_examples=min(4, settings.default.max_examples), deadline=None)
@given(episodes=unsplit_and_split())
def test_split_episode_has_gradient_of_whole_episode(
    name: str, episodes: tuple[list[list[ScoredRollout]], list[list[ScoredRollout]]]
) -> None:
    known = {"reference": strategies.tiny_llama(seed=9), "kl": IN_REWARD, "kl_coefficient": 0.3}
    built = [build(groups, name, **known).samples for groups in episodes]
    assert sum(int(sample.loss_mask.sum()) for sample in built[0]) == sum(int(s.loss_mask.sum()) for s in built[1])
    gradients = [gradient_of_step(name, samples) for samples in built]
    if float(gradients[0].norm()) > 0.0:
        assert_same(gradients[1], gradients[0], 1e-4)  # log-probabilities of the reference are float32


def gradient_of_step(name: str, samples: Sequence[TrainingSample]) -> torch.Tensor:
    """The gradient of a step on the samples, by the code of an update."""
    learner = make_learner(name, kl=IN_REWARD)
    learner.trial(samples)
    found = [p.grad.flatten() for p in learner.policy.parameters() if p.grad is not None]
    return torch.cat(found) if found else torch.zeros(1)


def test_shared_answer_is_trained_once() -> None:
    main = strategies.scored_rollout(1.0, completion_ids=(3, 4, 5, 6), loss_mask=(True, True, False, True))
    branch = strategies.scored_rollout(None, completion_ids=(3, 4, 8, 9), loss_mask=(False, False, False, True))
    first, second, _ = build([[strategies.forked(main, branch), strategies.scored_rollout(0.0)]]).samples
    assert first.loss_mask.tolist() == [True, True, False, True]
    assert second.loss_mask.tolist() == [False, False, False, True]
    assert second.advantages.tolist() == [0.0, 0.0, 0.0, first.advantages[0]]


def test_reward_moves_to_next_sample_with_own_token() -> None:
    nothing = strategies.scored_rollout(1.0, completion_ids=(3, 4), loss_mask=(False, False))
    item = strategies.forked(nothing, strategies.scored_rollout(None, completion_ids=(5, 6, 7)))
    (sample, _) = build([[item, strategies.scored_rollout(0.0)]]).samples
    assert sample.completion_ids == (5, 6, 7)
    assert token_rewards(item, "score").tolist() == [0.0, 0.0, 1.0]


def test_reward_comes_at_end_of_last_answer() -> None:
    item = strategies.forked(strategies.scored_rollout(1.0), strategies.scored_rollout(None, completion_ids=(5, 6)))
    assert token_rewards(item, "score").tolist() == [0.0, 0.0, 1.0, 0.0, 0.0]


def test_truncated_last_answer_masks_episode() -> None:
    cut = strategies.scored_rollout(None, completion_ids=(5, 6), finish_reason="length")
    short = strategies.scored_rollout(1.0, finish_reason="length")
    rest = [strategies.scored_rollout(0.0), strategies.scored_rollout(0.5)]
    by_branch = build([[strategies.forked(strategies.scored_rollout(1.0), cut), *rest]], truncated="mask")
    by_last = build([[strategies.forked(short, cut), *rest]], truncated="mask")
    assert [sample.episode for sample in by_branch.samples] == [0, 0, 1, 2]
    assert [sample.episode for sample in by_last.samples] == [0, 1]


def test_critic_refuses_branches() -> None:
    critic = ScalarHeadModel.with_random_head(strategies.tiny_llama(seed=1), torch.Generator().manual_seed(0))
    with pytest.raises(TrainingError, match="an episode has 4 samples, and the advantages of a critic") as caught:
        build([four_branches()], "ppo", critic=critic)
    assert "another history" in caught.value.where
    assert "sampling.agent.branches" in caught.value.fix


def test_groups_with_equal_prompts_are_separate() -> None:
    # Agents begin every episode alike, and an iteration may have a prompt twice.
    groups = [[strategies.scored_rollout(value) for value in (1.0, 0.0)] for _ in range(4)]
    dealt = split_by_group(build(groups).samples, 2, seed=0, epoch=0)
    assert [len({sample.group for sample in each}) for each in dealt] == [2, 2]
    assert not {sample.group for sample in dealt[0]} & {sample.group for sample in dealt[1]}


TAUGHT = KlConfig(coefficient=1.0, apply_to="reward")


def distil_config(**settings: object) -> RlConfig:
    return strategies.rl_config("distil", **({"kl": TAUGHT, "update": update_config(), "group_size": 1} | settings))


def distilled_experience(policy: LlamaForCausalLM, teacher: LlamaForCausalLM, seed: int = 3) -> Experience:
    """That of some completions which no reward judges."""
    rollouts = [item.rollout for group in strategies.random_groups(policy, seed, num_prompts=6) for item in group]
    scores = WeightedReward(())(rollouts)
    assert [score.value for score in scores] == [0.0] * len(rollouts)
    groups = [
        [replace(strategies.scored_rollout(0.0), rollout=rollout, score=score)]
        for rollout, score in zip(rollouts, scores, strict=True)
    ]
    algorithm = resolve_algorithm(distil_config())
    return experience_of(groups, algorithm, policy, teacher, kl=TAUGHT, kl_coefficient=1.0)


def test_distillation_from_itself_moves_nothing() -> None:
    policy, teacher = strategies.tiny_llama(), strategies.tiny_llama()
    experience = distilled_experience(policy, teacher)
    assert all(not bool(sample.advantages.any()) for sample in experience.samples)
    assert (experience.metrics["kl/ref"], experience.metrics["groups/zero_signal"]) == (0.0, 1.0)
    learner = Learner(policy, None, algorithm=resolve_algorithm(distil_config()), config=distil_config())
    before = weights_of(policy).clone()
    stats = learner.update(experience.samples, seed=0)
    assert not stats.moved
    assert torch.equal(weights_of(policy), before)
