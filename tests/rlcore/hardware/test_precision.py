"""Products of oneDNN, and the linear layers that use them, against float64 and the library's layer."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from rlcore.hardware.precision import Linear, product, use_onednn
from rlcore.models.adapter_targets import linear_names
from tests import strategies

ROUNDING = 1e-5  # of the norm, in float32 and sums of at most 688 numbers


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (drawn(300, 576), drawn(576, 192)),
        (drawn(576, 300).T, drawn(192, 576).T),
        (drawn(300, 1152)[:, ::2], drawn(576, 384)[:, 1::2]),
        (drawn(300, 1).expand(300, 576), drawn(1, 192).expand(576, 192)),
        (drawn(576).expand(300, 576), drawn(576, 192)),
        (drawn(2, 3), drawn(3, 2)),
        (drawn(0, 576), drawn(576, 192)),
    ],
    ids=["rows", "transposed", "strided", "expanded", "one row", "small", "empty"],
)
def test_a_product_is_the_product_whatever_its_layout(left: Tensor, right: Tensor) -> None:
    found = product(left, right)
    assert found.shape == (len(left), right.shape[1])
    if len(left):
        assert error(found, left.double() @ right.double()) < ROUNDING


def test_a_product_that_is_differentiated_has_its_gradient() -> None:
    left = drawn(300, 576).requires_grad_()
    product(left, drawn(576, 192)).sum().backward()
    assert left.grad is not None


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(300, 256), (2, 150, 256), (1, 256), (256,)])
def test_a_layer_and_its_gradients_are_those_of_the_library_in_float64(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    layer = use_onednn(nn.Sequential(nn.Linear(256, 688, bias=bias)))
    assert type(layer[0]) is Linear
    exact = nn.Sequential(nn.Linear(256, 688, bias=bias)).double()
    exact.load_state_dict(layer.state_dict())
    inputs = drawn(*shape).requires_grad_()
    wide = inputs.detach().double().requires_grad_()
    slopes = drawn(*shape[:-1], 688)
    found, wanted = layer(inputs), exact(wide)
    found.backward(slopes)
    wanted.backward(slopes.double())
    assert error(found.detach(), wanted.detach()) < ROUNDING
    pairs = zip((inputs, *layer.parameters()), (wide, *exact.parameters()), strict=True)
    assert all(error(mine.grad, other.grad) < ROUNDING for mine, other in pairs)


def test_gradients_that_nobody_needs_are_not_computed() -> None:
    layer = use_onednn(nn.Sequential(nn.Linear(256, 688).requires_grad_(False)))
    inputs = drawn(300, 256).requires_grad_()
    layer(inputs).sum().backward()
    assert inputs.grad is not None
    assert all(each.grad is None for each in layer.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_precisions_are_the_librarys_bit_for_bit(dtype: torch.dtype) -> None:
    layer = nn.Sequential(nn.Linear(256, 688).to(dtype))
    fast, inputs = use_onednn(copy.deepcopy(layer)), drawn(300, 256).to(dtype)
    assert torch.equal(fast(inputs), layer(inputs))
    single, fast_single = layer.float(), fast.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(fast_single(inputs.float()), single(inputs.float()))


def test_a_copy_of_a_model_has_layers_of_its_own_and_an_adapter_finds_them() -> None:
    model = use_onednn(strategies.tiny_llama())
    names, copied = linear_names(model), copy.deepcopy(model)
    assert names == linear_names(strategies.tiny_llama())
    with torch.no_grad():
        copied.model.layers[0].mlp.down_proj.weight.zero_()
    assert float(model.model.layers[0].mlp.down_proj.weight.detach().abs().max()) > 0.0
    assert copied.state_dict().keys() == model.state_dict().keys()
