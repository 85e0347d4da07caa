"""Optimizer, learning-rate schedule, loss scale and guarded steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from rlcore.config import OptimConfig
from rlcore.errors import ConfigError, NonFiniteError, TrainingError
from rlcore.extras import install_command
from rlcore.hardware.out_of_memory import retry_unless_distributed
from rlcore.hardware.precision import compute_dtype, no_autocast
from rlcore.hardware.sharded import ONE, Ranks, gather_full
from rlcore.text.packing import TokenSequence

if TYPE_CHECKING:
    from jaxtyping import Float

T = TypeVar("T")
_EPS = 1e-8
GROWTH_INTERVAL = 200  # steps without overflow before the scale is doubled
LARGEST = 2.0**24
_FIRST = 2.0**15

Report = Callable[[int, Mapping[str, float]], None]
"""Receiver of the metrics of each step, counted from 1."""


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


@dataclass(frozen=True, slots=True)
class LossScale:
    """Factor ``value`` of the loss against underflow in float16 (Micikevicius et al. 2018); 1 unless it ``adapts``.

    If the gradient overflows, the scale is halved and the step repeated. After many ``clean_steps`` it is doubled.
    Scales are powers of two, so dividing by them is exact.
    """

    value: float = 1.0
    clean_steps: int = 0
    adapts: bool = False

    @classmethod
    def of(cls, *models: Any) -> LossScale:
        """Return the initial scale of models; only products in float16 need one."""
        needed = any(compute_dtype(model) == torch.float16 for model in models)
        return cls(_FIRST, 0, adapts=True) if needed else cls()

    @property
    def can_shrink(self) -> bool:
        """True if an overflow may be caused by the scale."""
        return self.adapts and self.value > 1.0

    def after_overflow(self) -> LossScale:
        """Return half the scale."""
        return LossScale(self.value / 2.0, 0, adapts=self.adapts)

    def after_step(self) -> LossScale:
        """Return the scale of the next step: doubled after ``GROWTH_INTERVAL`` clean steps."""
        if not self.adapts:
            return self
        if self.clean_steps + 1 < GROWTH_INTERVAL:
            return LossScale(self.value, self.clean_steps + 1, adapts=True)
        return LossScale(min(2.0 * self.value, LARGEST), 0, adapts=True)


class Stepper:
    """Optimizer, schedule and loss scale of ``num_steps`` steps of one model.

    Args:
        model: Model whose trainable parameters are in ``groups``.
        groups: As in :func:`make_optimizer`.
        num_steps: Length of the schedule.
        tokens: First budget of a micro-batch; :attr:`tokens` is reduced when memory runs out.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: Sequence[tuple[nn.Module, float]],
        config: OptimConfig,
        *,
        num_steps: int,
        tokens: int,
        setting: str,
    ) -> None:
        self.optimizer, self.tokens = make_optimizer(groups, config), tokens
        self._scheduler = make_scheduler(self.optimizer, config, num_steps=num_steps)
        self._model, self._max_grad_norm, self._setting = model, config.max_grad_norm, setting
        self._scale = LossScale.of(groups[0][0])

    def take(
        self, accumulate: Callable[[int, float], T], sequences: Sequence[TokenSequence]
    ) -> tuple[T, dict[str, float]]:
        """Accumulate a gradient, clip it, take one step and clear it; retry after a float16 overflow or out of memory.

        Args:
            accumulate: Adds the gradient of the loss, given the tokens of a micro-batch and a factor of the loss.
            sequences: Sequences of the step, the longest of which must fit into memory.

        Returns:
            The result of ``accumulate``, and the metrics of the step: gradient norm, next learning rate.

        Raises:
            NonFiniteError: The gradient contains NaN or infinity; the weights are unchanged.
            TrainingError: One sequence, or the optimizer's state, does not fit into memory.
        """

        def attempt(tokens: int) -> T:
            self._model.zero_grad(set_to_none=True)
            return accumulate(tokens, self._scale.value)

        while True:
            result, self.tokens = retry_unless_distributed(
                self._model, attempt, self.tokens, sequences=sequences, setting=self._setting
            )
            learning = parameters_of(self.optimizer)
            try:
                norm = clip_gradient(learning, max_grad_norm=self._max_grad_norm, scale=self._scale.value)
                break
            except NonFiniteError:
                if not self._scale.can_shrink:
                    raise
            self._scale = self._scale.after_overflow()
        take_step(self.optimizer)
        self._scheduler.step()
        self._scale = self._scale.after_step()
        return result, {"gradient_norm": norm, "learning_rate": float(self._scheduler.get_last_lr()[0])}


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
