"""Optimizer, schedule and the guarded step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from rlcore.config import OptimConfig
from rlcore.errors import ConfigError, NonFiniteError

_EPS = 1e-8


def make_optimizer(groups: Iterable[tuple[nn.Module, float]], config: OptimConfig) -> torch.optim.Optimizer:
    """AdamW over the parameters that learn; ``groups`` are (module, learning rate). Matrices decay, vectors do not.

    Raises:
        ConfigError: the moments are to be held in 8 bits, and bitsandbytes is not installed.
    """
    described = []
    for module, learning_rate in groups:
        learning = [parameter for parameter in module.parameters() if parameter.requires_grad]
        for matrices in (True, False):
            chosen = [parameter for parameter in learning if (parameter.ndim >= 2) == matrices]
            if chosen:
                decay = config.weight_decay if matrices else 0.0
                described.append({"params": chosen, "lr": learning_rate, "weight_decay": decay})
    if config.kind == "adamw_8bit":
        return _eight_bit(described, config)
    return torch.optim.AdamW(described, betas=(config.beta1, config.beta2), eps=_EPS, fused=True)


def _eight_bit(described: list[dict[str, Any]], config: OptimConfig) -> torch.optim.Optimizer:
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as error:
        raise ConfigError(
            f"moments in 8 bits need bitsandbytes: {error}", where="optim.kind", fix="pip install 'rlcore[bnb]'"
        ) from error
    # Below 4,096 numbers it holds float32 moments: quantising those would save nothing.
    optimizer: torch.optim.Optimizer = AdamW8bit(described, betas=(config.beta1, config.beta2), eps=_EPS)
    return optimizer


def make_scheduler(
    optimizer: torch.optim.Optimizer, config: OptimConfig, *, num_steps: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """Linear warm-up over ``warmup_steps``, then constant, or linear or cosine to 0 at ``num_steps``."""

    def factor(step: int) -> float:
        if step < config.warmup_steps:
            return (step + 1) / config.warmup_steps
        done = (step - config.warmup_steps) / max(1, num_steps - config.warmup_steps)
        if config.schedule == "linear":
            return max(0.0, 1.0 - done)
        if config.schedule == "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))
        return 1.0

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def guarded_step(
    optimizer: torch.optim.Optimizer, scheduler: torch.optim.lr_scheduler.LRScheduler, *, max_grad_norm: float
) -> float:
    """Clip the gradient, take one step, clear the gradient; returns the norm before clipping.

    Raises:
        NonFiniteError: the gradient holds NaN or infinity; the weights are untouched.
    """
    norm = clip_gradient(parameters_of(optimizer), max_grad_norm=max_grad_norm)
    take_step(optimizer, scheduler)
    return norm


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """All that an optimizer moves, in its order; the last bits of a norm depend on the order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def clip_gradient(parameters: Iterable[nn.Parameter], *, max_grad_norm: float) -> float:
    """Scale the gradient to a norm of at most ``max_grad_norm``; returns the norm before.

    Raises:
        NonFiniteError: the gradient holds NaN or infinity; it is cleared.
    """
    parameters = list(parameters)
    norm = float(nn.utils.clip_grad_norm_(parameters, max_grad_norm))
    if not math.isfinite(norm):
        for parameter in parameters:
            parameter.grad = None
        raise NonFiniteError(
            f"the gradient norm is {norm}; no step was taken",
            fix="lower the learning rate, or look for a bad sample in the rollouts of this iteration",
        )
    return norm


def take_step(optimizer: torch.optim.Optimizer, scheduler: torch.optim.lr_scheduler.LRScheduler) -> None:
    """One step of optimizer and schedule; clears the gradient."""
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad(set_to_none=True)
