"""Episodes with several samples: one reward, one advantage and one weight, however an agent splits its conversation."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.algorithms.table import ALGORITHMS
from rlcore.config import KlConfig
from rlcore.errors import TrainingError
from rlcore.models.heads import ScalarHeadModel
from rlcore.training.experience import Experience, build_experience, token_rewards
from rlcore.training.minibatches import split_by_group, token_weights
from rlcore.training.sample_digests import digest
from rlcore.training.scoring_models import ScoringModels
from rlcore.types import ScoredRollout, TrainingSample
from tests import strategies
from tests.learners import assert_same, make_learner

ROWS = sorted(name for name, row in ALGORITHMS.items() if not row.uses_critic)
IN_REWARD = KlConfig(coefficient=0.1, apply_to="reward")


def build(groups: Sequence[Sequence[ScoredRollout]], algorithm: str = "grpo", **changes: Any) -> Experience:
    models = ScoringModels(
        policy=strategies.tiny_llama(),
        reference=changes.pop("reference", None),
        critic=changes.pop("critic", None),
        temperature=1.0,
        tokens_per_microbatch=256,
    )
    neutral = {"kl": KlConfig(), "kl_coefficient": 0.0, "truncated": "score", "need_old_logprobs": True}
    return build_experience(groups, ALGORITHMS[algorithm], models, **(neutral | changes))


def four_branches() -> list[ScoredRollout]:
    """Rewards 1, 0, 0, 0, where the first episode has four samples of 3, 2, 1 and 2 tokens."""
    branches = [
        strategies.scored_rollout(None, prompt_ids=(1, 2, 9), completion_ids=ids) for ids in ((6, 7), (8,), (9, 4))
    ]
    first = strategies.forked(strategies.scored_rollout(1.0), *branches)
    return [first, *(strategies.scored_rollout(0.0, completion_ids=(5, number)) for number in (3, 4, 6))]


def test_the_advantage_of_an_episode_is_its_rewards_against_the_group_and_all_its_samples_have_it() -> None:
    # Mean 1/4, population std sqrt(1/4 - 1/16) = 0.4330: 0.75 / 0.4330 = 1.7320 and -0.25 / 0.4330 = -0.5773.
    samples = build([four_branches()]).samples
    assert [sample.episode for sample in samples] == [0, 0, 0, 0, 1, 2, 3]
    assert [sample.group for sample in samples] == [0] * 7
    assert all(len(set(sample.advantages.tolist())) == 1 for sample in samples)
    advantages = [float(sample.advantages[0]) for sample in samples]
    assert advantages == pytest.approx([1.7320] * 4 + [-0.5773] * 3, abs=2e-4)


def test_rewards_and_groups_are_counted_by_episode() -> None:
    metrics = build([four_branches(), [strategies.scored_rollout(0.5), strategies.scored_rollout(0.5)]]).metrics
    assert metrics["reward/mean"] == pytest.approx((1.0 + 0.5 + 0.5) / 6)
    assert metrics["groups/zero_signal"] == 0.5
    assert metrics["completion/length"] == pytest.approx((8 + 3 * 2 + 2 * 3) / 6)


@pytest.mark.parametrize("name", ROWS)
def test_every_row_gives_an_episode_the_share_of_the_step_that_it_has_in_one_sample(name: str) -> None:
    samples = build([four_branches()], name, kl=IN_REWARD).samples
    weights = token_weights(ALGORITHMS[name], samples)
    share = float(torch.cat(weights[:4]).sum() / torch.cat(weights).sum())
    # 8 of 14 tokens, or one of four episodes.
    assert share == pytest.approx({"sequence_mean": 1 / 4}.get(weighting_of(name), 8 / 14), rel=1e-6)
    total = {"sequence_mean": 1.0, "token_mean": 1.0, "sequence_sum": 14 / 4, "constant": 14 / 4 / 1024}
    assert float(torch.cat(weights).sum()) == pytest.approx(total[weighting_of(name)], rel=1e-6)


def weighting_of(name: str) -> str:
    """The name of a row's weighting."""
    weighting: Any = ALGORITHMS[name].weighting
    return str(getattr(weighting, "func", weighting).__name__)


def test_the_kl_of_an_episode_is_the_sum_over_its_samples_and_lowers_its_one_reward() -> None:
    whole = strategies.scored_rollout(1.0, completion_ids=(3, 4, 5, 6))
    other = strategies.scored_rollout(0.0, completion_ids=(7, 2))
    known = {"reference": strategies.tiny_llama(seed=9), "kl": IN_REWARD, "kl_coefficient": 0.3}
    unsplit, split = build([[whole, other]], **known), build([[split_at(whole, 1, 3), other]], **known)
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
        pieces.append(
            dataclasses.replace(
                item,
                rollout=dataclasses.replace(
                    rollout,
                    completion_ids=rollout.completion_ids[:end],
                    loss_mask=mask,
                    sampler_logprobs=tuple(
                        x if own else 0.0 for x, own in zip(rollout.sampler_logprobs, mask, strict=False)
                    ),
                ),
            )
        )
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
            masked = dataclasses.replace(item, rollout=dataclasses.replace(item.rollout, loss_mask=mask))
            cuts = draw(st.sets(st.integers(1, length - 1), max_size=3)) if length > 1 else set()
            whole[-1].append(masked)
            split[-1].append(split_at(masked, *sorted(cuts)) if cuts else masked)
    return whole, split


@pytest.mark.parametrize("name", ROWS)
@settings(max_examples=min(8, settings.default.max_examples), deadline=None)
@given(episodes=unsplit_and_split())
def test_an_episode_that_is_split_into_branches_has_the_gradient_of_the_unsplit_one(
    name: str, episodes: tuple[list[list[ScoredRollout]], list[list[ScoredRollout]]]
) -> None:
    known = {"reference": strategies.tiny_llama(seed=9), "kl": IN_REWARD, "kl_coefficient": 0.3}
    built = [build(groups, name, **known).samples for groups in episodes]
    assert sum(int(sample.loss_mask.sum()) for sample in built[0]) == sum(int(s.loss_mask.sum()) for s in built[1])
    gradients = [gradient_of(name, samples) for samples in built]
    if float(gradients[0].norm()) > 0.0:
        assert_same(gradients[1], gradients[0], 1e-4)  # log-probabilities of the reference are float32


def gradient_of(name: str, samples: Sequence[TrainingSample]) -> torch.Tensor:
    """The gradient of a step on the samples, by the code of an update."""
    learner = make_learner(name, kl=IN_REWARD)
    learner.trial(samples)
    found = [p.grad.flatten() for p in learner.policy.parameters() if p.grad is not None]
    return torch.cat(found) if found else torch.zeros(1)


def test_a_shared_answer_is_trained_once() -> None:
    main = strategies.scored_rollout(1.0, completion_ids=(3, 4, 5, 6), loss_mask=(True, True, False, True))
    branch = strategies.scored_rollout(None, completion_ids=(3, 4, 8, 9), loss_mask=(False, False, False, True))
    first, second, _ = build([[strategies.forked(main, branch), strategies.scored_rollout(0.0)]]).samples
    assert first.loss_mask.tolist() == [True, True, False, True]
    assert second.loss_mask.tolist() == [False, False, False, True]
    assert second.advantages.tolist() == [0.0, 0.0, 0.0, first.advantages[0]]


def test_a_sample_without_a_token_of_the_policy_is_left_out_and_the_reward_goes_to_the_next() -> None:
    nothing = strategies.scored_rollout(1.0, completion_ids=(3, 4), loss_mask=(False, False))
    item = strategies.forked(nothing, strategies.scored_rollout(None, completion_ids=(5, 6, 7)))
    (sample, _) = build([[item, strategies.scored_rollout(0.0)]]).samples
    assert sample.completion_ids == (5, 6, 7)
    assert token_rewards(item, "score").tolist() == [0.0, 0.0, 1.0]


def test_the_reward_comes_at_the_end_of_the_last_answer_and_the_tokens_of_branches_follow_without_any() -> None:
    item = strategies.forked(strategies.scored_rollout(1.0), strategies.scored_rollout(None, completion_ids=(5, 6)))
    assert token_rewards(item, "score").tolist() == [0.0, 0.0, 1.0, 0.0, 0.0]


def test_a_truncated_last_answer_masks_the_whole_episode_and_a_truncated_branch_does_not() -> None:
    cut = strategies.scored_rollout(None, completion_ids=(5, 6), finish_reason="length")
    short = strategies.scored_rollout(1.0, finish_reason="length")
    rest = [strategies.scored_rollout(0.0), strategies.scored_rollout(0.5)]
    by_branch = build([[strategies.forked(strategies.scored_rollout(1.0), cut), *rest]], truncated="mask")
    by_last = build([[strategies.forked(short, cut), *rest]], truncated="mask")
    assert [sample.episode for sample in by_branch.samples] == [0, 0, 1, 2]
    assert [sample.episode for sample in by_last.samples] == [0, 1]


def test_a_critic_refuses_branches_and_says_why_and_what_to_do() -> None:
    critic = ScalarHeadModel.with_random_head(strategies.tiny_llama(seed=1), torch.Generator().manual_seed(0))
    with pytest.raises(
        TrainingError, match="an episode has 4 samples, and the advantages of a critic need one"
    ) as caught:
        build([four_branches()], "ppo", critic=critic)
    assert "another history" in caught.value.where
    assert "sampling.agent.branches" in caught.value.fix


def test_a_minibatch_holds_whole_groups_although_the_prompts_of_their_samples_differ() -> None:
    groups = [four_branches() for _ in range(3)]
    for number, group in enumerate(groups):
        for index, item in enumerate(group):
            prompt = dataclasses.replace(item.rollout.prompt, token_ids=(1, 2 + number, 20 + index))
            group[index] = dataclasses.replace(item, rollout=dataclasses.replace(item.rollout, prompt=prompt))
    dealt = split_by_group(build(groups).samples, 2, seed=0, epoch=0)
    assert sorted(len({sample.group for sample in each}) for each in dealt) == [1, 2]
    assert not {sample.group for sample in dealt[0]} & {sample.group for sample in dealt[1]}


def test_groups_whose_first_prompts_are_equal_are_dealt_as_several() -> None:
    # Agents begin every episode alike, and an iteration may have a prompt twice.
    groups = [[strategies.scored_rollout(value) for value in (1.0, 0.0)] for _ in range(4)]
    dealt = split_by_group(build(groups).samples, 2, seed=0, epoch=0)
    assert [len({sample.group for sample in each}) for each in dealt] == [2, 2]
    assert not {sample.group for sample in dealt[0]} & {sample.group for sample in dealt[1]}


def test_the_digest_of_a_sample_covers_its_episode_and_group() -> None:
    (sample, *_) = build([four_branches()]).samples
    others = [dataclasses.replace(sample, **{name: 9}) for name in ("episode", "group")]
    assert len({digest(each) for each in (sample, *others)}) == 3
