"""A frozen layer with a low-rank addition: the written-out formula, and what autograd makes of it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlcore.models.lora import low_rank_linear

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]


def problem(*leading: int, with_bias: bool = False, dtype: torch.dtype = torch.float64) -> Tensors:
    """Inputs of width 5 with a gradient, weight and bias of 7 outputs, A and B of rank 2 with gradients."""
    generator = torch.Generator().manual_seed(len(leading))

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    bias = draw(7) if with_bias else None
    return (
        draw(*leading, 5).requires_grad_(),
        draw(7, 5),
        bias,
        draw(2, 5).requires_grad_(),
        draw(7, 2).requires_grad_(),
    )


def written_out(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, down: torch.Tensor, up: torch.Tensor
) -> torch.Tensor:
    """With a scaling of 1.5."""
    output = inputs @ weight.T + 1.5 * (inputs @ down.T) @ up.T
    return output if bias is None else output + bias


def test_one_row_by_hand() -> None:
    # x = (1, 2): W x = (1 + 0, 1 + 2) = (1, 3); A x = 3 - 2 = 1; B A x = (2, -1); 1 + 10 * 2 = 21, 3 - 10 * 1 = -7.
    output = low_rank_linear(
        torch.tensor([1.0, 2.0])[None],
        torch.tensor([[1.0, 0.0], [1.0, 1.0]]),
        None,
        torch.tensor([[3.0, -1.0]]),
        torch.tensor([[2.0], [-1.0]]),
        10.0,
    )
    assert output.tolist() == [[21.0, -7.0]]


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.booleans())
def test_value_and_gradients_are_those_of_the_formula(leading: list[int], with_bias: bool) -> None:
    tensors = problem(*leading, with_bias=with_bias)
    learned = (tensors[0], tensors[3], tensors[4])
    ours, theirs = low_rank_linear(*tensors, 1.5), written_out(*tensors)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    weights = torch.linspace(-1.0, 1.0, ours.numel(), dtype=torch.float64).reshape(ours.shape)
    gradients = [torch.autograd.grad((weights * output).sum(), learned) for output in (ours, theirs)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


def test_inputs_that_need_no_gradient_get_none_and_the_adapter_its_own() -> None:
    inputs, weight, bias, down, up = problem(3)
    output = low_rank_linear(inputs.detach(), weight, bias, down, up, 1.5)
    output.sum().backward()
    assert inputs.grad is None
    assert down.grad is not None and up.grad is not None


def test_with_b_at_zero_the_layer_is_the_base_bit_for_bit() -> None:
    inputs, weight, _, down, up = problem(2, 3, dtype=torch.float32)
    base = torch.nn.functional.linear(inputs, weight)
    assert torch.equal(low_rank_linear(inputs, weight, None, down, torch.zeros_like(up), 1.5), base)


@pytest.mark.parametrize("base_dtype", [torch.float32, torch.bfloat16])
def test_under_autocast_products_are_in_half_precision_and_gradients_in_the_tensors_own(
    base_dtype: torch.dtype,
) -> None:
    inputs, weight, _, down, up = problem(4, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = low_rank_linear(inputs, weight.to(base_dtype), None, down, up, 1.5)
    output.float().sum().backward()
    assert output.dtype == torch.float32
    assert {each.grad.dtype for each in (inputs, down, up) if each.grad is not None} == {torch.float32}
    torch.testing.assert_close(output.float(), written_out(inputs, weight, None, down, up), rtol=0.05, atol=0.1)
    expected = torch.autograd.grad(written_out(inputs, weight, None, down, up).sum(), (inputs, down, up))
    for each, gradient in zip((inputs, down, up), expected, strict=True):
        torch.testing.assert_close(each.grad, gradient, rtol=0.05, atol=0.2)


def test_a_small_addition_is_not_rounded_away_in_half_precision() -> None:
    """A thousandth of an output: below the spacing of bfloat16 around 1, which is 0.008."""
    inputs, weight = torch.ones(1, 1), torch.ones(1, 1, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = low_rank_linear(inputs, weight, None, torch.ones(1, 1), torch.full((1, 1), 1e-3), 1.0)
    assert output.item() == pytest.approx(1.001, abs=1e-5)
    narrow = low_rank_linear(inputs.bfloat16(), weight, None, torch.ones(1, 1), torch.full((1, 1), 1e-3), 1.0)
    assert (narrow.dtype, narrow.item()) == (
        torch.bfloat16,
        1.0,
    )  # without autocast all is in half precision, as in vLLM
