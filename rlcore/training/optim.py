"""Optimizer, learning-rate schedule and guarded steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from rlcore.config import OptimConfig
from rlcore.errors import ConfigError, NonFiniteError, TrainingError
from rlcore.extras import install_command
from rlcore.hardware.precision import no_autocast
from rlcore.hardware.ranks import ONE, Ranks, gather_full
from rlcore.training.loss_scale import LossScale

if TYPE_CHECKING:
    from jaxtyping import Float

T = TypeVar("T")
_EPS = 1e-8


def make_optimizer(groups: Iterable[tuple[nn.Module, float]], config: OptimConfig) -> torch.optim.Optimizer:
    """Return AdamW over the trainable parameters of (module, learning rate) ``groups``; only matrices decay.

    Raises:
        ConfigError: 8-bit moments are configured, but bitsandbytes is not installed.
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
            f"moments in 8 bits need bitsandbytes: {error}", where="optim.kind", fix=install_command("bnb")
        ) from error
    # It keeps float32 moments of tensors below 4,096 numbers, where quantization would save nothing.
    optimizer: torch.optim.Optimizer = AdamW8bit(described, betas=(config.beta1, config.beta2), eps=_EPS)
    return optimizer


def make_scheduler(
    optimizer: torch.optim.Optimizer, config: OptimConfig, *, num_steps: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """Return a schedule: linear ``warmup_steps``, then constant, or linear or cosine to 0 at ``num_steps``."""

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


def set_schedule_step(scheduler: torch.optim.lr_scheduler.LambdaLR, step: int) -> None:
    """Set a schedule to ``step``, counted from 0, whose learning rate the optimizer's next step uses."""
    scheduler.last_epoch = step
    for group, base, factor in zip(
        scheduler.optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True
    ):
        group["lr"] = base * factor(step)
    scheduler._last_lr = [group["lr"] for group in scheduler.optimizer.param_groups]


def zero_grad(*models: nn.Module | None) -> None:
    """Clear the gradients of models and free their memory; None entries are skipped."""
    for model in filter(None, models):
        model.zero_grad(set_to_none=True)


def add_gradient(loss: Float[Tensor, ""], *, scale: float, name: str, ranks: Ranks = ONE) -> None:
    """Add the gradient of ``scale * loss`` to the parameters.

    Raises:
        NonFiniteError: The loss is NaN or infinite on any of the ``ranks``; ``name`` identifies the loss.
    """
    if ranks.any(not bool(loss.isfinite())):
        raise NonFiniteError(
            f"{name} is {', '.join(map(str, ranks.gather(float(loss.detach()))))}; no step was taken",
            fix="lower the learning rate, or check the samples of this step; in float16, "
            "try hardware.dtype = 'bfloat16', which has a larger range",
        )
    with no_autocast(loss):  # a surrounding autocast would affect the backward pass
        (scale * loss).backward()  # type: ignore[no-untyped-call]


def guarded_step(
    accumulate: Callable[[float], T],
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    *,
    max_grad_norm: float,
    scale: LossScale,
) -> tuple[T, float, LossScale]:
    """Accumulate a gradient, clip it, take one step and clear the gradient; retry after a float16 overflow.

    Args:
        accumulate: Adds the gradient of the loss times the given factor to the parameters.
        optimizer: Optimizer with cleared gradients.
        scheduler: Schedule, which takes a step too.
        max_grad_norm: Bound of the true gradient, without the factor.
        scale: Loss scale.

    Returns:
        The result of ``accumulate``, the norm before clipping, and the scale of the next step.

    Raises:
        NonFiniteError: The gradient contains NaN or infinity; the weights are unchanged.
    """
    while True:
        result = accumulate(scale.value)
        try:
            norm = clip_gradient(parameters_of(optimizer), max_grad_norm=max_grad_norm, scale=scale.value)
        except NonFiniteError:
            if not scale.can_shrink:
                raise
            scale = scale.after_overflow()
            continue
        take_step(optimizer)
        scheduler.step()
        return result, norm, scale.after_step()


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return an optimizer's parameters in its order, on which the last bits of a norm depend."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def clip_gradient(parameters: Iterable[nn.Parameter], *, max_grad_norm: float, scale: float = 1.0) -> float:
    """Divide the gradient by the loss factor ``scale``, clip its norm to ``max_grad_norm``, and return the norm before.

    Raises:
        NonFiniteError: The gradient contains NaN or infinity; it is cleared.
    """
    parameters = list(parameters)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if scale != 1.0 and gradients:  # a batch without signal has none
        torch._foreach_mul_(gradients, 1.0 / scale)
    norm = _clip(parameters, max_grad_norm)
    if not math.isfinite(norm):
        for parameter in parameters:
            parameter.grad = None
        raise NonFiniteError(
            f"the gradient norm is {norm}; no step was taken",
            fix="lower the learning rate, or check the rollouts of this iteration; "
            "in float16, try hardware.dtype = 'bfloat16', which has a larger range",
        )
    return norm


def _clip(parameters: Sequence[nn.Parameter], max_norm: float) -> float:
    """Clip all gradients to norm ``max_norm``; return the norm before."""
    meshes: dict[object, list[Tensor]] = {}
    for gradient in (parameter.grad for parameter in parameters if parameter.grad is not None):
        meshes.setdefault(getattr(gradient, "device_mesh", None), []).append(gradient)
    if len(meshes) <= 1:
        return float(gather_full(nn.utils.clip_grad_norm_(parameters, max_norm)))
    # torch clips gradients of a single mesh, but sharded matrices have another mesh than the rest.
    norm = float(torch.stack([gather_full(nn.utils.get_total_norm(each)) for each in meshes.values()]).norm())
    for each in meshes.values():
        torch._foreach_mul_(each, min(1.0, max_norm / (norm + 1e-6)))
    return norm


def take_step(optimizer: torch.optim.Optimizer) -> None:
    """Take one step of the optimizer and clear the gradient.

    Raises:
        TrainingError: The optimizer's moments, created in its first step, do not fit into memory.
    """
    try:
        optimizer.step()
    except torch.OutOfMemoryError as error:
        raise TrainingError(
            f"out of memory in the optimizer's step: {error}",
            fix="set optim.kind = 'adamw_8bit', train an adapter (lora.rank), or leave the engine less of the GPU "
            "(engine.gpus.gpu_memory_utilization)",
        ) from error
    optimizer.zero_grad(set_to_none=True)
