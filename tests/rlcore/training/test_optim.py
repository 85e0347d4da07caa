"""Optimizer and schedule: which parameters decay, the rates step by step, the guarded step."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch

from rlcore.config import OptimConfig
from rlcore.errors import ConfigError, NonFiniteError
from rlcore.hardware.memory_meter import optimizer_bytes
from rlcore.training.loss_scale import LossScale
from rlcore.training.optim import clip_gradient, guarded_step, make_optimizer, make_scheduler


def step(
    accumulate: Callable[[float], None],
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    scale: LossScale | None = None,
) -> tuple[float, LossScale]:
    """A guarded step: the norm before clipping, and the next scale."""
    _, norm, after = guarded_step(accumulate, optimizer, scheduler, max_grad_norm=1.0, scale=scale or LossScale())
    return norm, after


def rates(num_steps: int, **settings: Any) -> list[float]:
    """The learning rate of each step, for a base rate of 1."""
    module, config = torch.nn.Linear(2, 1), OptimConfig(**settings)
    optimizer = make_optimizer([(module, 1.0)], config)
    scheduler = make_scheduler(optimizer, config, num_steps=num_steps)
    seen = []
    for _ in range(num_steps):
        seen.append(float(optimizer.param_groups[0]["lr"]))
        step(lambda scale: module(torch.ones(1, 2)).sum().mul(scale).backward(), optimizer, scheduler)
    return seen


def test_a_constant_schedule_stays_after_its_warm_up() -> None:
    assert rates(5, warmup_steps=2) == [0.5, 1.0, 1.0, 1.0, 1.0]


def test_a_linear_schedule_falls_to_zero_at_the_end() -> None:
    # Two steps of warm-up, then 1 - done/4.
    assert rates(6, warmup_steps=2, schedule="linear") == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25])


def test_a_cosine_schedule_is_half_way_down_in_the_middle() -> None:
    expected = [0.5 * (1 + math.cos(math.pi * step / 4)) for step in range(4)]  # 1, 0.854, 0.5, 0.146
    assert rates(4, schedule="cosine") == pytest.approx(expected)


def test_matrices_decay_and_vectors_do_not_each_module_at_its_own_rate() -> None:
    first, second = torch.nn.Linear(3, 2), torch.nn.Linear(2, 2)
    second.bias.requires_grad_(False)
    optimizer = make_optimizer([(first, 0.1), (second, 0.2)], OptimConfig(weight_decay=0.5))
    described = [
        ([p.ndim for p in group["params"]], group["lr"], group["weight_decay"]) for group in optimizer.param_groups
    ]
    assert described == [([2], 0.1, 0.5), ([1], 0.1, 0.0), ([2], 0.2, 0.5)]


def steps_of(kind: Literal["adamw", "adamw_8bit"], gradients: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The weights after a step along each gradient, and the bytes of the optimizer's state."""
    module = torch.nn.Linear(128, 64, bias=False)
    torch.nn.init.zeros_(module.weight)
    optimizer = make_optimizer([(module, 0.01)], OptimConfig(kind=kind, weight_decay=0.1))
    for gradient in gradients:
        module.weight.grad = gradient.clone()
        optimizer.step()
    return module.weight.detach(), optimizer_bytes([optimizer])


def test_moments_in_eight_bits_take_a_quarter_and_step_alike() -> None:
    gradients = torch.randn(10, 64, 128, generator=torch.Generator().manual_seed(0)) + 0.5
    (exact, whole), (rounded, small) = steps_of("adamw", gradients), steps_of("adamw_8bit", gradients)
    # Two bytes a weight instead of eight, two scales for each 256 weights, and two maps of 256 numbers.
    assert small == 2 * 8192 + 2 * 4 * 8192 // 256 + 2 * 4 * 256
    assert whole >= 8 * 8192
    # Ten steps of 0.01 each: moments are rounded to within some per cent.
    assert float((rounded - exact).abs().max()) < 0.02
    assert float((rounded - exact).abs().mean()) < 0.001
    assert not torch.equal(rounded, exact)


def test_without_bitsandbytes_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    with pytest.raises(ConfigError, match=r"rlcore\[bnb\]"):
        make_optimizer([(torch.nn.Linear(2, 2), 0.1)], OptimConfig(kind="adamw_8bit"))


def test_the_guarded_step_returns_the_norm_before_clipping_and_clears_the_gradient() -> None:
    module = torch.nn.Linear(2, 1, bias=False)
    optimizer = make_optimizer([(module, 1.0)], OptimConfig())
    module.weight.grad = torch.tensor([[3.0, 4.0]])
    norm, _ = step(lambda scale: None, optimizer, make_scheduler(optimizer, OptimConfig(), num_steps=1))
    assert norm == pytest.approx(5.0)
    assert module.weight.grad is None


def test_clipping_scales_a_long_gradient_and_leaves_a_short_one() -> None:
    module = torch.nn.Linear(2, 1, bias=False)
    for scale, expected in ((1.0, [0.6, 0.8]), (0.1, [0.3, 0.4])):
        module.weight.grad = torch.tensor([[3.0, 4.0]]) * scale
        clip_gradient(module.parameters(), max_grad_norm=1.0)
        assert module.weight.grad[0].tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_non_finite_gradient_takes_no_step_and_is_cleared(bad: float) -> None:
    module = torch.nn.Linear(2, 1, bias=False)
    optimizer = make_optimizer([(module, 1.0)], OptimConfig())
    scheduler = make_scheduler(optimizer, OptimConfig(), num_steps=1)
    before = module.weight.detach().clone()
    module.weight.grad = torch.tensor([[1.0, bad]])
    with pytest.raises(NonFiniteError, match="gradient norm"):
        step(lambda scale: None, optimizer, scheduler)
    assert torch.equal(module.weight, before)
    assert (module.weight.grad, scheduler.last_epoch) == (None, 0)


def test_a_scaled_gradient_is_clipped_and_stepped_on_as_if_it_had_no_scale() -> None:
    stepped = []
    for scale in (LossScale(), LossScale(1024.0, adapts=True)):
        module = torch.nn.Linear(2, 1, bias=False)
        torch.nn.init.ones_(module.weight)
        optimizer = make_optimizer([(module, 0.1)], OptimConfig())
        scheduler = make_scheduler(optimizer, OptimConfig(), num_steps=1)

        def accumulate(factor: float, module: torch.nn.Linear = module) -> None:
            module.weight.grad = factor * torch.tensor([[3.0, 4.0]])

        norm, _ = step(accumulate, optimizer, scheduler, scale)
        stepped.append((norm, module.weight.tolist()))
    assert stepped[0] == stepped[1]
    assert stepped[0][0] == pytest.approx(5.0)


def test_an_overflow_is_computed_again_with_half_the_scale_and_is_one_step() -> None:
    module = torch.nn.Linear(2, 1, bias=False)
    optimizer = make_optimizer([(module, 0.1)], OptimConfig())
    scheduler = make_scheduler(optimizer, OptimConfig(), num_steps=2)
    seen = []

    def accumulate(scale: float) -> None:
        seen.append(scale)
        module.weight.grad = torch.tensor([[1.0, math.inf if scale > 100.0 else scale]])

    _, after = step(accumulate, optimizer, scheduler, LossScale(256.0, 7, adapts=True))
    assert seen == [256.0, 128.0, 64.0]
    assert after == LossScale(64.0, 1, adapts=True)
    assert scheduler.last_epoch == 1


def test_an_overflow_that_no_scale_explains_is_an_error() -> None:
    module = torch.nn.Linear(2, 1, bias=False)
    optimizer = make_optimizer([(module, 0.1)], OptimConfig())
    scheduler = make_scheduler(optimizer, OptimConfig(), num_steps=1)
    seen = []

    def accumulate(scale: float) -> None:
        seen.append(scale)
        module.weight.grad = torch.tensor([[1.0, math.inf]])

    with pytest.raises(NonFiniteError, match="gradient norm"):
        step(accumulate, optimizer, scheduler, LossScale(4.0, adapts=True))
    assert seen == [4.0, 2.0, 1.0]
