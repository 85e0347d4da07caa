"""Did a step move the weights as its optimizer should, and does every weight learn that should?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rlcore.config import OptimConfig, RlConfig
from rlcore.models.architectures import trunk
from rlcore.models.lora import AdaptedModel
from rlcore.models.sharded import is_alone
from rlcore.ranks import is_shard
from rlcore.training.learner import Learner
from rlcore.training.optim import parameters_of

_SLICE = 4096  # numbers of a tensor that are followed through a step
_PATIENCE = 10  # steps, after which every tensor has had a gradient
_EPS = 1e-8


class StepWitness:
    """Watches the optimizers of a learner from their hooks, and keeps what it finds as sentences.

    Every weight that should learn is in an optimizer, and gets a gradient within ten steps. In the first step of each
    update the clipped norm is within its bound, and a few numbers move exactly as AdamW's formula says, at the rate
    that the schedule has then.
    """

    def __init__(self, learner: Learner) -> None:
        self._learner, self._faults = learner, list[str]()
        self._names = {id(p): name for name, p in _learning(learner)}
        self._without = {id(o): {id(p) for p in parameters_of(o)} & self._names.keys() for o in learner.optimizers}
        self._steps = {id(optimizer): 0 for optimizer in learner.optimizers}
        self._watched: set[int] = set()  # optimizers whose first step of this update was looked at
        self._followed: dict[int, _Followed] = {}
        self._left: dict[
            int, tuple[nn.Parameter, Tensor, float]
        ] = {}  # what a step has left of a tensor, and its number
        for optimizer in learner.optimizers:
            optimizer.register_step_pre_hook(self._before)
            optimizer.register_step_post_hook(self._after)
        held = {id(p) for optimizer in learner.optimizers for p in parameters_of(optimizer)}
        self._say_missing([name for key, name in self._names.items() if key not in held], "are in no optimizer")

    def forget(self) -> None:
        """Weights were set from outside, as a resume does."""
        self._left.clear()

    def take_faults(self) -> list[str]:
        """What was found since the last call; asked after each update."""
        found, self._faults = self._faults, []
        self._watched.clear()
        return found

    def _before(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        key = id(optimizer)
        learning = [p for p in parameters_of(optimizer) if p.grad is not None]
        self._look_for_gradients(optimizer, learning)
        if key in self._watched:
            return
        self._watched.add(key)
        if key in self._left:
            self._look_at_what_was_left(optimizer, *self._left.pop(key))
        config = _config_of(self._learner, optimizer)
        self._check_norm(learning, config)
        chosen = next((p for p in reversed(learning) if not is_shard(p)), None)
        if chosen is not None and config.kind == "adamw":
            self._followed[key] = _Followed.of(self._learner, optimizer, chosen)

    def _after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        followed = self._followed.pop(id(optimizer), None)
        known = followed.parameter if followed else self._left.get(id(optimizer), (None,))[0]
        if known is not None:
            self._left[id(optimizer)] = known, _slice(known), _step_of(optimizer, known)
        if followed is None:
            return
        expected, found = followed.expected(_config_of(self._learner, optimizer)), _slice(followed.parameter)
        distance, size = float((found - expected).norm()), float((expected - followed.start).norm())
        if distance > 1e-2 * size + 1e-6 * float(expected.norm()):
            moved = float((found - followed.start).norm())
            self._faults.append(
                f"a step moved {self._names.get(id(followed.parameter), 'a tensor')} by {moved:.3g}; "
                f"AdamW at this point of the schedule moves it by {size:.3g}, to a place {distance:.3g} from there"
            )

    def _look_at_what_was_left(
        self, optimizer: torch.optim.Optimizer, parameter: nn.Parameter, left: Tensor, step: float
    ) -> None:
        name, found = self._names.get(id(parameter), "a tensor"), _step_of(optimizer, parameter)
        if not torch.equal(left, _slice(parameter)):
            self._faults.append(f"{name} is another than its last step has left it: weights moved outside of steps")
        if found != step:
            self._faults.append(f"the moments of {name} are of {found:.0f} steps, and it has taken {step:.0f}")

    def _look_for_gradients(self, optimizer: torch.optim.Optimizer, learning: Sequence[nn.Parameter]) -> None:
        """Cross off the tensors that have one; once all have, this costs nothing."""
        without = self._without[id(optimizer)]
        trains_policy = optimizer is not self._learner.optimizer or len(learning) > 1  # else a head warms up alone
        if not without or not trains_policy:
            return
        without -= {id(p) for p in learning if id(p) in without and bool(p.grad.any())}  # type: ignore[union-attr]
        self._steps[id(optimizer)] += 1
        if without and self._steps[id(optimizer)] >= _PATIENCE:
            names = [name for key, name in self._names.items() if key in without]
            without.clear()
            self._say_missing(names, f"got no gradient in {_PATIENCE} steps")

    def _say_missing(self, names: Sequence[str], what: str) -> None:
        if names:
            shown = ", ".join(names[:4])
            self._faults.append(f"{len(names)} of {len(self._names)} tensors that should learn {what}: {shown}")

    def _check_norm(self, learning: Sequence[nn.Parameter], config: OptimConfig) -> None:
        if not is_alone(self._learner.policy) or self._learner.shares_trunk or not learning:
            return  # shards are parts of a norm, and a shared step has two bounds
        norms = torch._foreach_norm([p.grad for p in learning if p.grad is not None])
        norm = float(torch.stack([each.double() for each in norms]).norm())
        if norm > config.max_grad_norm * 1.01 + 1e-6:
            self._faults.append(f"a step takes a gradient of norm {norm:.3g}; clipping allows {config.max_grad_norm:g}")


def rate_at(config: OptimConfig, highest: float, step: int, *, num_steps: int) -> float:
    """The learning rate of a step, counted from 0: linear warm-up, then the schedule down to 0 at ``num_steps``."""
    if step < config.warmup_steps:
        return highest * (step + 1) / config.warmup_steps
    done = min(1.0, (step - config.warmup_steps) / max(1, num_steps - config.warmup_steps))
    return (
        highest
        * {"constant": 1.0, "linear": 1.0 - done, "cosine": (1.0 + math.cos(math.pi * done)) / 2.0}[config.schedule]
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Followed:
    """A few numbers of a tensor before a step, with all that the step needs."""

    parameter: nn.Parameter
    start: Tensor
    gradient: Tensor
    first: Tensor
    second: Tensor
    step: float
    learning_rate: float

    @classmethod
    def of(cls, learner: Learner, optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> _Followed:
        state: Mapping[str, Any] = optimizer.state.get(parameter, {})
        nothing = torch.zeros_like(_slice(parameter))
        return cls(
            parameter=parameter,
            start=_slice(parameter),
            gradient=_slice(parameter.grad),
            first=_slice(state["exp_avg"]) if state else nothing,
            second=_slice(state["exp_avg_sq"]) if state else nothing,
            step=_step_of(optimizer, parameter),
            learning_rate=_expected_rate(learner, optimizer, parameter),
        )

    def expected(self, config: OptimConfig) -> Tensor:
        """The numbers after AdamW's step (Loshchilov and Hutter 2019, algorithm 2), float64."""
        first = config.beta1 * self.first + (1.0 - config.beta1) * self.gradient
        second = config.beta2 * self.second + (1.0 - config.beta2) * self.gradient**2
        step = self.step + 1.0
        corrected = first / (1.0 - config.beta1**step)
        spread = (second / (1.0 - config.beta2**step)).sqrt() + _EPS
        decay = config.weight_decay if self.parameter.ndim >= 2 else 0.0
        moved: Tensor = self.start * (1.0 - self.learning_rate * decay) - self.learning_rate * corrected / spread
        return moved


def _expected_rate(learner: Learner, optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> float:
    """What the schedule has at the first step of this update, for a weight of the policy or of the critic."""
    config: RlConfig = learner.config
    steps = config.update.epochs * config.update.minibatches
    critics = learner.value_module.parameters() if learner.value_module is not None else ()
    is_critics = any(each is parameter for each in critics)
    highest = config.critic.learning_rate if is_critics else config.learning_rate
    place = learner.schedulers[0].last_epoch
    first = learner.policy_version * steps
    place = min(max(place, first), first + steps - 1)  # steps without a gradient are not taken
    return rate_at(_config_of(learner, optimizer), highest, place, num_steps=config.num_iterations * steps)


def _config_of(learner: Learner, optimizer: torch.optim.Optimizer) -> OptimConfig:
    update = learner.config.update.optim
    return update if optimizer is learner.optimizer else learner.config.critic.optim or update


def _learning(learner: Learner) -> Iterator[tuple[str, nn.Parameter]]:
    """Every weight that has to learn: an adapter, or the layers of a trunk but its experts, and the critic's own."""
    yield from _layers_of(learner.policy)
    critic = learner.critic
    if critic is not None:
        yield from ((f"critic.head.{name}", p) for name, p in critic.head.named_parameters())
        if not learner.shares_trunk:
            yield from ((f"critic.{name}", p) for name, p in _layers_of(critic.backbone))


def _layers_of(model: Any) -> Iterator[tuple[str, nn.Parameter]]:
    if isinstance(model, AdaptedModel):
        yield from model.named_parameters()
        return
    modules: Any = trunk(model)
    lists = [(name, each) for name, each in modules.named_modules() if isinstance(each, nn.ModuleList)]
    if lists:
        name, layers = max(lists, key=lambda pair: sum(p.numel() for p in pair[1].parameters()))
        yield from ((f"{name}.{path}", p) for path, p in layers.named_parameters() if "expert" not in path)


def _step_of(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> float:
    """How many steps the moments of a parameter are of."""
    return float(optimizer.state.get(parameter, {}).get("step", 0.0))


def _slice(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.detach().flatten()[:_SLICE].double().cpu().clone()
