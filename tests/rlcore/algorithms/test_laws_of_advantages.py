"""Laws of every advantage: what shifting, scaling, reordering, repeating or adding rewards may change, in float64."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.algorithms.advantages import (
    STD_EPSILON,
    AdvantageFn,
    AdvantageInputs,
    batch_normalized,
    gae,
    group_centered,
    group_normalized,
    group_over_mean,
    group_relative,
    leave_one_out,
    whiten,
)
from tests import strategies

law = settings(max_examples=min(30, settings.default.max_examples), deadline=None)

WITHIN_GROUP = [group_normalized, group_centered, leave_one_out, group_over_mean]
EVERY = [*WITHIN_GROUP, batch_normalized, partial(group_relative, scale="batch")]
CENTRED = [group_centered, leave_one_out]  # in units of the reward
every = pytest.mark.parametrize("function", EVERY)
grid = st.integers(-40, 40).map(lambda n: n / 8)  # exact in floats, so that a shift leaves differences as they are


@st.composite
def groups(draw: st.DrawFn) -> tuple[list[float], list[int]]:
    """Rewards and the number of the group of each, up to four groups of up to five."""
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    number = [place for place, size in enumerate(sizes) for _ in range(size)]
    return draw(st.lists(grid, min_size=len(number), max_size=len(number))), number


def advantages_of(function: AdvantageFn, rewards: list[float], number: list[int]) -> list[float]:
    """One advantage per completion, float64."""
    values = torch.zeros(len(rewards), 1, dtype=torch.float64)
    result: list[float] = function(strategies.episodes(rewards, group=number, values=values))[:, 0].tolist()
    return result


def members(number: list[int]) -> list[list[int]]:
    """The places of each group's members."""
    return [[i for i, other in enumerate(number) if other == group] for group in sorted(set(number))]


@pytest.mark.parametrize("function", [f for f in EVERY if f is not group_over_mean])
@law
@given(batch=groups(), shift=grid)
def test_a_constant_added_to_every_reward_changes_nothing(
    function: AdvantageFn, batch: tuple[list[float], list[int]], shift: float
) -> None:
    rewards, number = batch
    moved = advantages_of(function, [reward + shift for reward in rewards], number)
    assert moved == pytest.approx(advantages_of(function, rewards, number), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("function", CENTRED)
@law
@given(batch=groups(), factor=st.sampled_from([0.25, 2.0, 64.0]))
def test_advantages_without_a_scale_grow_with_the_rewards(
    function: AdvantageFn, batch: tuple[list[float], list[int]], factor: float
) -> None:
    rewards, number = batch
    expected = [factor * a for a in advantages_of(function, rewards, number)]
    assert advantages_of(function, [factor * r for r in rewards], number) == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("function", [f for f in EVERY if f not in CENTRED])
@law
@given(batch=groups(), factor=st.sampled_from([2.0, 64.0]))
def test_scaled_advantages_do_not_depend_on_the_unit_of_the_reward(
    function: AdvantageFn, batch: tuple[list[float], list[int]], factor: float
) -> None:
    # Up to the epsilon beside the std, which is a 1e-6 / 0.05 of the smallest std here.
    rewards, number = batch
    scaled = advantages_of(function, [factor * r for r in rewards], number)
    assert scaled == pytest.approx(advantages_of(function, rewards, number), rel=1e-4, abs=1e-9)
    assert STD_EPSILON <= 1e-6


@pytest.mark.parametrize("function", [f for f in EVERY if f is not group_over_mean])
@law
@given(batch=groups())
def test_negated_rewards_give_negated_advantages(function: AdvantageFn, batch: tuple[list[float], list[int]]) -> None:
    rewards, number = batch
    negated = advantages_of(function, [-reward for reward in rewards], number)
    assert negated == pytest.approx([-a for a in advantages_of(function, rewards, number)], rel=1e-9, abs=1e-9)


@every
@law
@given(batch=groups(), seed=st.integers(0, 99))
def test_the_order_of_the_completions_does_not_matter(
    function: AdvantageFn, batch: tuple[list[float], list[int]], seed: int
) -> None:
    rewards, number = batch
    order = torch.randperm(len(rewards), generator=torch.Generator().manual_seed(seed)).tolist()
    mixed = advantages_of(function, [rewards[i] for i in order], [number[i] for i in order])
    straight = advantages_of(function, rewards, number)
    assert mixed == pytest.approx([straight[i] for i in order], rel=1e-9, abs=1e-9)


@every
@law
@given(batch=groups())
def test_a_better_reward_of_a_group_never_has_a_smaller_advantage(
    function: AdvantageFn, batch: tuple[list[float], list[int]]
) -> None:
    rewards, number = batch
    result = advantages_of(function, rewards, number)
    for group in members(number):
        ordered = [result[i] for i in sorted(group, key=lambda i: rewards[i])]
        assert all(low <= high + 1e-12 for low, high in itertools.pairwise(ordered))


@pytest.mark.parametrize("function", [f for f in EVERY if f is not batch_normalized])
@law
@given(batch=groups())
def test_the_advantages_of_a_group_sum_to_zero(function: AdvantageFn, batch: tuple[list[float], list[int]]) -> None:
    rewards, number = batch
    result = advantages_of(function, rewards, number)
    assert [sum(result[i] for i in group) for group in members(number)] == pytest.approx(
        [0.0] * len(members(number)), abs=1e-9
    )


@law
@given(batch=groups())
def test_batch_normalised_advantages_sum_to_zero_over_the_batch(batch: tuple[list[float], list[int]]) -> None:
    assert sum(advantages_of(batch_normalized, *batch)) == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("function", [group_normalized, group_centered, group_over_mean])
@law
@given(batch=groups(), copies=st.integers(2, 4))
def test_a_group_sampled_several_times_over_has_the_same_advantages(
    function: AdvantageFn, batch: tuple[list[float], list[int]], copies: int
) -> None:
    rewards, number = batch
    if function is group_over_mean:
        rewards = [abs(reward) for reward in rewards]  # the guard for penalties knows the size of the group
    repeated = advantages_of(function, rewards * copies, number * copies)
    assert repeated == pytest.approx(advantages_of(function, rewards, number) * copies, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("function", WITHIN_GROUP)
@law
@given(batch=groups(), others=groups())
def test_what_other_groups_got_does_not_matter(
    function: AdvantageFn, batch: tuple[list[float], list[int]], others: tuple[list[float], list[int]]
) -> None:
    rewards, number = batch
    more = advantages_of(function, rewards + others[0], number + [100 + n for n in others[1]])
    assert more[: len(rewards)] == advantages_of(function, rewards, number)


@every
@law
@given(batch=groups(), value=strategies.finite_floats, size=st.integers(1, 8))
def test_a_group_of_equal_rewards_is_exactly_zero_beside_any_other_group(
    function: AdvantageFn, batch: tuple[list[float], list[int]], value: float, size: int
) -> None:
    if function is batch_normalized:  # it compares across groups, so here it has a signal
        return
    rewards, number = batch
    result = advantages_of(function, rewards + [value] * size, number + [99] * size)
    assert result[len(rewards) :] == [0.0] * size


@law
@given(rewards=st.lists(grid.map(abs), min_size=2, max_size=8))
def test_group_over_mean_is_the_centred_reward_over_the_mean(rewards: list[float]) -> None:
    mean = sum(rewards) / len(rewards)
    expected = [(r - mean) / mean if mean > 0 else 0.0 for r in rewards]
    assert advantages_of(group_over_mean, rewards, [0] * len(rewards)) == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("scale", ["group", "group_sample", "batch", "batch_sample"])
@law
@given(batch=groups())
def test_dividing_by_a_std_keeps_the_direction_of_the_centred_rewards(
    scale: str, batch: tuple[list[float], list[int]]
) -> None:
    rewards, number = batch
    scaled = advantages_of(partial(group_relative, scale=scale), rewards, number)
    centred = advantages_of(group_centered, rewards, number)
    for group in members(number):
        factors = [scaled[i] / centred[i] for i in group if centred[i] != 0.0]
        assert all(factor > 0.0 for factor in factors)
        assert factors == pytest.approx(factors[:1] * len(factors), rel=1e-9)


def episode(seed: int, length: int = 7, rows: int = 3) -> AdvantageInputs:
    """Random rewards and values with tool output here and there, float64."""
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, rows, length, generator=generator, dtype=torch.float64)
    mask = torch.rand(rows, length, generator=generator) > 0.3
    return strategies.episodes([0.0] * rows, mask=mask, token_rewards=rewards, values=values)


seeds = st.integers(0, 10_000)
shares = st.floats(0.0, 1.0)


@law
@given(seed=seeds, gamma=shares, lam=shares)
def test_gae_satisfies_its_recursion_over_the_policys_own_tokens(seed: int, gamma: float, lam: float) -> None:
    data = episode(seed)
    result = gae(data, gamma=gamma, lam=lam)
    for row in range(3):
        own = data.mask[row].nonzero().squeeze(1).tolist()
        for here, there in itertools.pairwise(own):
            delta = data.token_rewards[row, here] + gamma * data.values[row, there] - data.values[row, here]
            assert float(result[row, here]) == pytest.approx(float(delta + gamma * lam * result[row, there]), abs=1e-9)


def whitening(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and a mask, float64 [3, 7], at least two tokens."""
    data = episode(seed)
    mask = data.mask.clone()
    mask[0, :2] = True
    return data.token_rewards, mask


@law
@given(seed=seeds, shift=grid, factor=st.sampled_from([0.5, 3.0]))
def test_whitening_forgets_unit_and_level(seed: int, shift: float, factor: float) -> None:
    advantages, mask = whitening(seed)
    torch.testing.assert_close(
        whiten(factor * advantages + shift, mask), whiten(advantages, mask), rtol=1e-9, atol=1e-9
    )
