"""Audit of gradients: a step's gradient is that of the backward passes, up to one clipping factor."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from rlcore.distributed.ranks import is_shard
from rlcore.distributed.sharded import is_single_process
from rlcore.seeding import shuffled
from rlcore.training.learner import Learner
from rlcore.training.optim import parameters_of

_TENSORS = 32  # tensors compared between backward pass and step
_NUMBERS = 256  # entries per tensor
_CLOSE = 1e-3


class GradientChecker:
    """Checker that compares gradients of random tensors after the backward passes and before the step.

    The gradients may differ by one common factor, that of clipping; it is 1 if the norm is within its limit. For a
    sharded model, or on several ranks, gradients are sums over ranks, so only the norm is checked.
    """

    def __init__(self, learner: Learner, names: Mapping[int, str]) -> None:
        self._learner, self._names, self._draws = learner, names, 0
        self._raw: dict[int, Tensor] = {}
        self._chosen: dict[int, set[int]] = {}
        for optimizer in learner.optimizers if is_single_process(learner.policy) else ():
            self.forget(optimizer)
            for parameter in _whole(optimizer):
                parameter.register_post_accumulate_grad_hook(partial(self._keep, id(optimizer)))  # type: ignore[no-untyped-call]

    def forget(self, optimizer: torch.optim.Optimizer) -> None:
        """Choose other tensors of this optimizer after a step."""
        learning = _whole(optimizer)
        for parameter in learning:
            self._raw.pop(id(parameter), None)
        self._draws += 1
        order = shuffled(len(learning), self._draws, "tensors of a step")[:_TENSORS]
        self._chosen[id(optimizer)] = {id(learning[index]) for index in order}

    def errors(self, optimizer: torch.optim.Optimizer, learning: Sequence[nn.Parameter]) -> list[str]:
        """Return the errors of the gradient of the coming step."""
        learner = self._learner
        if not is_single_process(learner.policy) or not learning:
            return []
        own = {id(p) for p in learner.value_module.parameters()} if learner.value_module is not None else set()
        parts = [[p for p in learning if (id(p) in own) == is_critics] for is_critics in (False, True)]
        update = learner.config.update.optim
        bounds = (update.max_grad_norm, (learner.config.critic.optim or update).max_grad_norm)
        pairs = zip(parts, bounds, strict=True)
        chosen = self._chosen[id(optimizer)]
        return [error for part, bound in pairs if part and (error := self._error(part, chosen, bound))]

    def _error(self, learning: Sequence[nn.Parameter], chosen: Collection[int], bound: float) -> str:
        norms = torch._foreach_norm([p.grad for p in learning if p.grad is not None])
        norm = float(torch.stack([each.double() for each in norms]).norm())
        if norm > bound * 1.01 + 1e-6:
            return f"a step has a gradient of norm {norm:.3g}; the clipping limit is {bound:g}"
        followed = [p for p in learning if id(p) in chosen]
        for parameter in followed:
            if id(parameter) not in self._raw:
                return f"the gradient of {self._names.get(id(parameter), 'a tensor')} comes from no backward pass"
        if not followed:
            return ""
        scale = self._learner.loss_scale.value
        raw = [self._raw[id(p)].double().cpu() / scale for p in followed]
        now = [_slice(p.grad).double().cpu() for p in followed]
        power = sum(float(each @ each) for each in raw)
        if not power:
            return ""
        factor = sum(float(one @ other) for one, other in zip(raw, now, strict=True)) / power
        for parameter, one, other in zip(followed, raw, now, strict=True):
            if float((other - factor * one).norm()) > _CLOSE * float(other.norm()) + 1e-12:
                name = self._names.get(id(parameter), "a tensor")
                return f"the gradient of {name} changed between backward pass and step, others did not"
        is_whole, is_cut = abs(factor - 1.0) <= _CLOSE, 0.0 < factor < 1.0 and norm >= 0.98 * bound
        if is_whole or is_cut:
            return ""
        return f"a step has {factor:.3g} times the gradient of its backward passes, without need for clipping"

    def _keep(self, optimizer: int, parameter: Tensor) -> None:
        if id(parameter) in self._chosen[optimizer]:
            self._raw[id(parameter)] = _slice(parameter.grad).clone()


def _whole(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for parameter in parameters_of(optimizer) if not is_shard(parameter)]


def _slice(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.detach().flatten()[:_NUMBERS]
