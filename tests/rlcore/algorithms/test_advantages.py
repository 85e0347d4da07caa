"""Advantages: values worked by hand, equal rewards, masks, groups and tolerances."""

from __future__ import annotations

import dataclasses
import math
from functools import partial

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from rlcore.algorithms.advantages import (
    EQUAL_REWARDS,
    AdvantageFn,
    batch_normalized,
    gae,
    group_centered,
    group_normalized,
    group_over_mean,
    group_relative,
    has_signal,
    leave_one_out,
    length_adaptive_gae,
    per_token_reward,
    whiten,
)
from tests import strategies
from tests.reference import advantages as reference

BY_BATCH = partial(group_relative, scale="batch")
GROUP_ADVANTAGES = [
    group_normalized,
    group_centered,
    leave_one_out,
    batch_normalized,
    group_over_mean,
    BY_BATCH,
    partial(group_relative, scale="group_sample"),
    partial(group_relative, scale="batch_sample"),
]


def of_one_group(function: AdvantageFn, rewards: list[float]) -> list[float]:
    """One advantage per completion, each of a single token."""
    advantages: list[float] = function(strategies.episodes(rewards))[:, 0].tolist()
    return advantages


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        # R = [1.0, 0.8, 0.4, 0.2]: mean 0.6; deviations 0.4, 0.2, -0.2, -0.4; squares 0.16 + 0.04 + 0.04 + 0.16 = 0.40;
        # population variance 0.1, std 0.3162; 0.4 / 0.3162 = 1.2649, 0.2 / 0.3162 = 0.6325; by the mean 0.6667, 0.3333.
        (group_normalized, [1.2649, 0.6325, -0.6325, -1.2649]),
        (group_centered, [0.4, 0.2, -0.2, -0.4]),
        (group_over_mean, [0.66667, 0.33333, -0.33333, -0.66667]),
        # The others of 1.0: (0.8 + 0.4 + 0.2) / 3 = 0.466667, so 0.533333; of 0.8: 1.6 / 3, so 0.266667; and so on.
        (leave_one_out, [0.533333, 0.266667, -0.266667, -0.533333]),
    ],
)
def test_group_advantages_by_hand(function: AdvantageFn, expected: list[float]) -> None:
    assert of_one_group(function, [1.0, 0.8, 0.4, 0.2]) == pytest.approx(expected, abs=5e-5)


def test_per_token_reward_ignores_later_rewards() -> None:
    # ln π_teacher - ln π of three tokens, the second of which is tool output: 0.5, masked, -2.
    mask = torch.tensor([[True, False, True]])
    own = torch.tensor([[0.5, 9.0, -2.0]], dtype=torch.float64)
    assert per_token_reward(strategies.episodes([7.5], mask=mask, token_rewards=own)).tolist() == [[0.5, 0.0, -2.0]]


def test_batch_normalized_compares_across_groups() -> None:
    # Two groups, [1, 0] and [1, 1]: mean 0.75, variance 0.75 * 0.25 = 0.1875, std 0.4330;
    # 0.25 / 0.4330 = 0.5774 and -0.75 / 0.4330 = -1.7321. Within the second group nothing differs, across the batch
    # it does.
    episodes = strategies.episodes([1.0, 0.0, 1.0, 1.0], group=[0, 0, 1, 1])
    assert batch_normalized(episodes)[:, 0].tolist() == pytest.approx([0.5774, -1.7321, 0.5774, 0.5774], abs=1e-4)


def test_scales_of_group_relative_by_hand() -> None:
    # Groups [1, 0] and [3, 1]; deviations 0.5, -0.5, 1, -1. All rewards: mean 1.25; squares 0.0625 + 1.5625 + 3.0625
    # + 0.0625 = 4.75; population variance 1.1875, std 1.08972; sample variance 4.75 / 3 = 1.58333, std 1.25831.
    episodes = strategies.episodes([1.0, 0.0, 3.0, 1.0], group=[0, 0, 1, 1])
    assert BY_BATCH(episodes)[:, 0].tolist() == pytest.approx([0.45883, -0.45883, 0.91766, -0.91766], abs=1e-5)
    by_sample = group_relative(episodes, scale="batch_sample")
    assert by_sample[:, 0].tolist() == pytest.approx([0.39736, -0.39736, 0.79472, -0.79472], abs=1e-5)
    # Of the group [3, 1] alone: sample variance (1 + 1) / 1 = 2, std 1.41421.
    of_group = group_relative(episodes, scale="group_sample")[2:, 0]
    assert of_group.tolist() == pytest.approx([0.70711, -0.70711], abs=1e-5)


def test_group_over_mean_weighs_hard_prompts_more() -> None:
    # One success in four: mean 0.25, (1 - 0.25) / 0.25 = 3, (0 - 0.25) / 0.25 = -1. Three in four: 1/3 and -1.
    assert of_one_group(group_over_mean, [1.0, 0.0, 0.0, 0.0]) == pytest.approx([3.0, -1.0, -1.0, -1.0])
    assert of_one_group(group_over_mean, [1.0, 1.0, 1.0, 0.0]) == pytest.approx([1 / 3, 1 / 3, 1 / 3, -1.0])
    # Mean 0.01, floor (1 - -0.98) / 2 = 0.99: A = [0.99 / 0.99, -0.99 / 0.99], not 99.
    assert of_one_group(group_over_mean, [1.0, -0.98]) == pytest.approx([1.0, -1.0])


def test_rewards_within_bound_are_equal() -> None:
    bound = torch.tensor(EQUAL_REWARDS, dtype=torch.float64)
    assert not has_signal(torch.stack([bound * 0, bound]))
    assert has_signal(torch.stack([bound * 0, bound * 2]))
    pair, whole = torch.stack([bound * 0, bound])[None], torch.ones(1, 2, dtype=torch.bool)
    assert whiten(pair, whole).tolist() == [[0.0, 0.0]]
    assert whiten(2.0 * pair, whole).tolist() == [[-1.0, 1.0]]
    # A mean of exactly the bound counts as no success at all.
    episodes = dataclasses.replace(strategies.episodes([0.0, 0.0]), rewards=torch.stack([bound * 0, bound * 2]))
    assert group_over_mean(episodes).abs().sum() == 0.0


def test_whitening_of_float32_computes_in_float64() -> None:
    values = torch.tensor([[10_000.0, 10_001.0, 10_000.5, 10_003.25]], dtype=torch.float32)
    # Mean 10001.1875; deviations -1.1875, -0.1875, -0.6875, 2.0625; squares 1.41015625 + 0.03515625 + 0.47265625
    # + 4.25390625 = 6.171875: exact in float64, while float32 has steps of 0.001 here.
    std = math.sqrt(6.171875 / 4)
    expected = torch.tensor([[-1.1875 / std, -0.1875 / std, -0.6875 / std, 2.0625 / std]])
    assert torch.equal(whiten(values, torch.ones(1, 4, dtype=torch.bool)), expected)


def test_adaptive_lambda_computes_in_float64() -> None:
    rewards = torch.tensor([[0.0, 0.0, 1.0], [0.1, 0.2, 0.5]], dtype=torch.float64)
    episodes = strategies.episodes([1.0, 0.8], mask=torch.ones(2, 3, dtype=torch.bool), token_rewards=rewards)
    lam = 1.0 - 1.0 / (0.7 * 3)
    assert torch.equal(length_adaptive_gae(episodes, gamma=1.0, alpha=0.7), gae(episodes, gamma=1.0, lam=lam))


@pytest.mark.parametrize("rewards", [[1.0, -1.0], [0.0, -3.0], [-0.5, -1.0, 0.25]])
def test_group_over_mean_is_zero_unless_mean_is_positive(rewards: list[float]) -> None:
    assert of_one_group(group_over_mean, rewards) == [0.0] * len(rewards)


@pytest.mark.parametrize("function", GROUP_ADVANTAGES)
@given(value=strategies.finite_floats, size=st.integers(1, 16))
@example(value=0.7, size=8)
@example(value=3.5, size=1)
def test_equal_rewards_give_exactly_zero(function: AdvantageFn, value: float, size: int) -> None:
    # std + tiny eps gave 59.6 for eight rewards of 0.7 in one system: the mean of eight 0.7 is not 0.7 in floats.
    assert of_one_group(function, [value] * size) == [0.0] * size


@pytest.mark.parametrize("function", GROUP_ADVANTAGES)
def test_unscored_completion_is_outside_baseline(function: AdvantageFn) -> None:
    with_failure = of_one_group(function, [1.0, math.nan, 0.2, 0.6])
    without = of_one_group(function, [1.0, 0.2, 0.6])
    assert with_failure == [without[0], 0.0, without[1], without[2]]


@pytest.mark.parametrize("function", GROUP_ADVANTAGES)
def test_tokens_of_completion_share_advantage_and_masked_get_zero(function: AdvantageFn) -> None:
    mask = torch.tensor([[True, False, True], [True, True, False]])
    advantages = function(strategies.episodes([1.0, 0.0], mask=mask))
    assert advantages[0, 0] == advantages[0, 2] > 0
    assert advantages[1, 0] == advantages[1, 1] < 0
    assert advantages[~mask].tolist() == [0.0, 0.0]


def gae_of(rewards: list[float], values: list[float], mask: list[bool]) -> list[float]:
    episodes = strategies.episodes(
        [sum(rewards)],
        mask=torch.tensor([mask]),
        token_rewards=torch.tensor([rewards], dtype=torch.float64),
        values=torch.tensor([values]),
    )
    result: list[float] = gae(episodes, gamma=1.0, lam=0.95)[0].tolist()
    return result


def test_gae_skips_tool_output() -> None:
    # Five tokens of the policy with three tool outputs of 16 tokens in all between them; V = 0.5 on every token of the
    # policy, reward 1 at the end, gamma 1, lam 0.95. Every delta is 0 but the last, 1 - 0.5 = 0.5, so the first token's
    # advantage is 0.5 * 0.95^k, k being the number of steps to the end:
    #   k = 4, the policy's own steps:                          0.5 * 0.95^4  = 0.4073   right
    #   k = 4 + 3, one decay for each tool output:              0.5 * 0.95^7  = 0.3492   wrong (0.35)
    #   k = 4 + 16, one decay for each token of tool output:    0.5 * 0.95^20 = 0.1792   wrong (0.18)
    own, tool = [True], [False]
    mask = own + tool * 6 + own + tool * 5 + own + tool * 5 + own + own
    rewards = [0.0] * (len(mask) - 1) + [1.0]
    values = [0.5 if is_own else -3.0 for is_own in mask]  # what the critic says of tool output does not matter
    result = gae_of(rewards, values, mask)
    assert result[0] == pytest.approx(0.41, abs=0.005)
    assert result[0] == pytest.approx(0.5 * 0.95**4, abs=1e-6)
    compressed = gae_of([0.0] * 4 + [1.0], [0.5] * 5, [True] * 5)
    assert [result[t] for t in range(len(mask)) if mask[t]] == compressed
    assert [result[t] for t in range(len(mask)) if not mask[t]] == [0.0] * 16


def test_whitening_uses_unmasked_tokens() -> None:
    mask = torch.tensor([[True, True, False], [True, True, True]])
    advantages = torch.tensor([[1.0, 2.0, math.nan], [3.0, 4.0, 10.0]])
    result = whiten(advantages, mask)
    assert result[mask].tolist() == pytest.approx(reference.whiten([1.0, 2.0, 3.0, 4.0, 10.0]), abs=1e-6)
    assert float(result[mask].mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(result[mask].var(unbiased=False)) == pytest.approx(1.0, abs=1e-5)
    assert result[0, 2] == 0.0


@given(value=st.floats(width=32, allow_nan=False, allow_infinity=False), count=st.integers(1, 9))
def test_whitening_equal_advantages_gives_zero(value: float, count: int) -> None:
    result = whiten(torch.full((1, count), value), torch.ones(1, count, dtype=torch.bool))
    assert result.tolist() == [[0.0] * count]


def test_whitening_nothing_gives_zeros() -> None:
    assert whiten(torch.full((1, 2), math.nan), torch.zeros(1, 2, dtype=torch.bool)).tolist() == [[0.0, 0.0]]


def test_tolerances_are_documented_ones() -> None:
    # Rewards that differ by 1e-8 or less are equal; 1e-6 stands beside the std: 0.5 / (0.5 + 1e-6) = 0.999998000004.
    assert EQUAL_REWARDS == 1e-8
    values = torch.zeros(2, 1, dtype=torch.float64)
    for function in (group_normalized, batch_normalized, BY_BATCH):
        first = float(function(strategies.episodes([1.0, 0.0], values=values))[0])
        assert first == pytest.approx(0.999998000004, abs=1e-11)
    # The sample std of [1, 0] is sqrt(0.5): 0.5 / (0.7071067812 + 1e-6) = 0.7071057812.
    for scale in ("group_sample", "batch_sample"):
        first = float(group_relative(strategies.episodes([1.0, 0.0], values=values), scale=scale)[0])
        assert first == pytest.approx(0.7071057812, abs=1e-9)


def test_truncated_episode_bootstraps_next_value() -> None:
    # gamma 0.5, lam 0.8, r = [0, 1], V = [0.2, 0.4]. Cut with V_next = 0.6: delta_1 = 1 + 0.3 - 0.4 = 0.9,
    # delta_0 = 0.5 * 0.4 - 0.2 = 0, A = [0.4 * 0.9, 0.9] = [0.36, 0.9]. Ended: delta_1 = 0.6, A = [0.24, 0.6].
    # The third token of each row is masked: the next value is carried over it without decay.
    rows = strategies.episodes(
        [1.0, 1.0],
        mask=torch.tensor([[True, True, False]] * 2),
        token_rewards=torch.tensor([[0.0, 1.0, 0.0]] * 2, dtype=torch.float64),
        values=torch.tensor([[0.2, 0.4, 9.0]] * 2),
        next_values=torch.tensor([0.6, 0.0]),
    )
    cut, ended = gae(rows, gamma=0.5, lam=0.8).tolist()
    assert cut == pytest.approx([0.36, 0.9, 0.0])
    assert ended == pytest.approx([0.24, 0.6, 0.0])


def test_length_adaptive_lambda_by_hand() -> None:
    # alpha 0.5. Four tokens: lam = 1 - 1/2 = 0.5; V = 0 and r = 1 at the end, so A = [1/8, 1/4, 1/2, 1].
    # Two tokens (and padding): lam = 1 - 1/1 = 0, A = [0, 1]. One token: 1 - 2 < 0 counts as 0, A = [1].
    lengths = [4, 2, 1]
    mask = torch.tensor([[t < length for t in range(4)] for length in lengths])
    rewards = torch.tensor([[float(t == length - 1) for t in range(4)] for length in lengths], dtype=torch.float64)
    rows = strategies.episodes([1.0] * 3, mask=mask, token_rewards=rewards)
    # alpha 0.1: 1 - 1/0.2 = -4 for two tokens counts as 0 too.
    assert length_adaptive_gae(rows, gamma=1.0, alpha=0.1)[1].tolist() == [0.0, 1.0, 0.0, 0.0]
    assert length_adaptive_gae(rows, gamma=1.0, alpha=0.5).tolist() == [
        [0.125, 0.25, 0.5, 1.0],
        [0.0, 1.0, 0.0, 0.0],
        [1.0, 0.0, 0.0, 0.0],
    ]


@pytest.mark.parametrize("function", GROUP_ADVANTAGES)
def test_groups_may_be_interleaved(function: AdvantageFn) -> None:
    together = function(strategies.episodes([1.0, 0.0, 3.0, 1.0, 0.5], group=[0, 0, 1, 1, 1]))[:, 0]
    mixed = function(strategies.episodes([3.0, 1.0, 1.0, 0.5, 0.0], group=[1, 0, 1, 1, 0]))[:, 0]
    assert mixed[[1, 4, 0, 2, 3]].tolist() == pytest.approx(together.tolist(), rel=1e-6)


@pytest.mark.parametrize("function", [group_normalized, group_centered, leave_one_out, group_over_mean])
def test_other_groups_do_not_change_advantages_within_group(function: AdvantageFn) -> None:
    both = function(strategies.episodes([1.0, 0.0, 3.0, 1.0], group=[0, 0, 1, 1]))[:, 0]
    assert both[:2].tolist() == of_one_group(function, [1.0, 0.0])
