"""The critic's loss and explained variance, worked by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlcore.algorithms.values import explained_variance, value_loss
from tests.reference import losses


def test_the_value_loss_takes_the_worse_of_plain_and_clipped() -> None:
    # V 1.0, V_old 0.5, R 2.0, range 0.2: clipped V = 0.7; 0.5 * max((1 - 2)^2, (0.7 - 2)^2) = 0.5 * 1.69 = 0.845.
    # V 1.0, V_old 0.5, R 0.6: 0.5 * max(0.16, 0.01) = 0.08.
    values, old, returns = torch.tensor([1.0, 1.0]), torch.tensor([0.5, 0.5]), torch.tensor([2.0, 0.6])
    assert value_loss(values, old, returns, clip_range=0.2).tolist() == pytest.approx([0.845, 0.08])


def test_a_clip_range_of_zero_means_no_clipping() -> None:
    loss = value_loss(torch.tensor([1.0]), torch.tensor([0.5]), torch.tensor([2.0]), clip_range=0.0)
    assert float(loss) == 0.5


@given(value=st.floats(-3, 3), old=st.floats(-3, 3), target=st.floats(-3, 3), clip=st.floats(0.01, 1.0))
def test_the_value_loss_equals_the_plain_loop(value: float, old: float, target: float, clip: float) -> None:
    tensors = (torch.tensor([number], dtype=torch.float64) for number in (value, old, target))
    loss = value_loss(*tensors, clip_range=clip)
    assert float(loss) == pytest.approx(losses.value_loss(value, old, target, clip=clip), rel=1e-9, abs=1e-12)


def test_explained_variance_is_one_for_a_perfect_critic_and_zero_for_a_constant_one() -> None:
    returns = torch.tensor([1.0, 2.0, 3.0])
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(torch.full((3,), 7.0), returns) == pytest.approx(0.0)
    assert explained_variance(-returns, returns) == pytest.approx(-3.0)  # Var(2 R) / Var(R) = 4


def test_explained_variance_is_zero_where_the_returns_do_not_vary() -> None:
    assert explained_variance(torch.tensor([1.0, 2.0]), torch.tensor([5.0, 5.0])) == 0.0


def test_returns_that_hardly_vary_count_as_constant() -> None:
    # Variances 0.64e-12 and 1.44e-12, on both sides of 1e-12; the critic is perfect.
    for spread, expected in ((0.8e-6, 0.0), (1.2e-6, 1.0)):
        returns = torch.tensor([-spread, spread], dtype=torch.float64)
        assert explained_variance(returns, returns) == expected


def test_beyond_the_huber_delta_an_error_counts_linearly() -> None:
    # delta 0.5. Error 0.4: 0.5 * 0.16 = 0.08, the square. Error -2: 0.5 * (2 - 0.5 / 2) = 0.875.
    loss = value_loss(
        torch.tensor([1.4, 0.0]), torch.zeros(2), torch.tensor([1.0, 2.0]), clip_range=0.0, huber_delta=0.5
    )
    assert loss.tolist() == pytest.approx([0.08, 0.875])


def test_clipping_and_huber_take_the_worse_of_the_two_penalties() -> None:
    # V 1.0, V_old 0.5, R 2.0, range 0.2: errors -1 and -1.3; with delta 0.5: 0.5 * (1.3 - 0.25) = 0.525.
    loss = value_loss(torch.tensor([1.0]), torch.tensor([0.5]), torch.tensor([2.0]), clip_range=0.2, huber_delta=0.5)
    assert float(loss) == pytest.approx(0.525)


@given(error=st.floats(-9, 9), delta=st.floats(0.1, 3.0))
def test_the_gradient_of_huber_is_the_error_cut_at_delta(error: float, delta: float) -> None:
    value = torch.tensor([error], dtype=torch.float64, requires_grad=True)
    nothing = torch.zeros(1, dtype=torch.float64)
    value_loss(value, nothing, nothing, clip_range=0.0, huber_delta=delta).sum().backward()
    assert value.grad is not None
    assert float(value.grad) == pytest.approx(max(-delta, min(delta, error)), abs=1e-12)
