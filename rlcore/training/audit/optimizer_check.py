"""Audit of the optimizer: each step moves the weights by AdamW's formula, and every trainable weight is trained."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rlcore.config import OptimConfig, RlConfig
from rlcore.hardware.sharded import is_shard, is_single_process
from rlcore.models.lora import AdaptedModel, MergedState
from rlcore.seeding import generator, shuffled
from rlcore.training.learner import Learner
from rlcore.training.optim import parameters_of

_PATIENCE = 10  # steps within which every tensor must have a gradient
_EPS = 1e-8
_ROWS = 64  # of an adapted weight, compared after an update


class OptimizerChecker:
    """Checker in the hooks of a learner's optimizers, which collects errors as sentences.

    Every trainable weight is in an optimizer, and has a gradient within ten steps. The gradient of each step is that of
    the backward passes after clipping (``gradients``). Random entries of every tensor move exactly by AdamW's formula
    at the scheduled learning rate, do not change between steps, and are equal on all ranks that have them.
    """

    def __init__(self, learner: Learner) -> None:
        self._learner, self._errors, self._count = learner, list[str](), 0
        self._counted = self._taken = 0  # steps of the policy: as the learner counts them, as the hook counts them
        self._names = {id(p): name for name, p in _learning(learner)}
        self._without = {id(o): {id(p) for p in parameters_of(o)} & self._names.keys() for o in learner.optimizers}
        self._steps = {id(optimizer): 0 for optimizer in learner.optimizers}
        self._followed: dict[int, _Followed] = {}
        self._left: dict[int, _Left] = {}
        self._gradients = GradientChecker(learner, self._names)
        for optimizer in learner.optimizers:
            optimizer.register_step_pre_hook(self._before)
            optimizer.register_step_post_hook(self._after)
        held = {id(p) for optimizer in learner.optimizers for p in parameters_of(optimizer)}
        self._add_missing([name for key, name in self._names.items() if key not in held], "are in no optimizer")

    def forget(self) -> None:
        """Accept weights that were set outside of a step, as by a resume."""
        self._left.clear()

    def pop_errors(self) -> list[str]:
        """Return the errors since the last call, of all ranks. Call it after each update."""
        for optimizer in self._learner.optimizers:
            self._check_unchanged(optimizer)
        for error in adapter_errors(self._learner):
            self._add(error)
        expected, taken = self._learner.steps_taken - self._counted, self._taken
        self._counted, self._taken = self._learner.steps_taken, 0
        if expected != taken:
            self._add(f"the policy's optimizer took {taken} steps since the last update, expected {expected}")
        found, self._errors = self._errors, []
        ranks = self._learner.ranks
        if ranks.size > 1:
            every = ranks.gather((found, [each.numbers for each in self._left.values() if each.is_whole]))
            found = list(dict.fromkeys(sentence for sentences, _ in every for sentence in sentences))
            if any(not _same(every[0][1], numbers) for _, numbers in every):
                found.append("replicated weights differ between ranks after the same steps")
        return found

    @torch.no_grad()
    def _before(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        key = id(optimizer)
        learning = [p for p in parameters_of(optimizer) if p.grad is not None]
        self._check_gradients(optimizer, learning)
        self._check_unchanged(optimizer)
        self._left.pop(key, None)
        self._errors += self._gradients.errors(optimizer, learning)
        chosen = [p for p in learning if local_part(p).numel()]
        if chosen and _config_of(self._learner, optimizer).kind == "adamw":
            self._count += 1
            self._followed[key] = _Followed.of(self._learner, optimizer, chosen, seed=self._count)

    @torch.no_grad()
    def _after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._gradients.forget(optimizer)
        self._taken += optimizer is self._learner.optimizer
        followed = self._followed.pop(id(optimizer), None)
        if followed is None:
            return
        found = followed.where.numbers()
        self._left[id(optimizer)] = _Left(followed.where, found, _steps_of(optimizer, followed.where.parameters))
        expected = followed.expected(_config_of(self._learner, optimizer))
        worst = followed.where.worst(found, expected, followed.start)
        if worst is None:
            return
        parameter, moved, size, distance = worst
        self._add(
            f"a step moved {self._names.get(id(parameter), 'a tensor')} by {moved:.3g}; "
            f"AdamW at this point of the schedule moves it by {size:.3g} (difference {distance:.3g})"
        )

    def _check_unchanged(self, optimizer: torch.optim.Optimizer) -> None:
        left = self._left.get(id(optimizer))
        if left is None:
            return
        names = [self._names.get(id(p), "a tensor") for p in left.where.parameters]
        differs = left.where.differing(left.numbers)
        if differs:
            name = names[differs[0]]
            self._add(f"{name} changed outside of optimizer steps")
        for name, found, step in zip(names, _steps_of(optimizer, left.where.parameters), left.steps, strict=True):
            if found != step:
                self._add(f"the moments of {name} are of {found:.0f} steps, expected {step:.0f}")
                break

    def _check_gradients(self, optimizer: torch.optim.Optimizer, learning: Sequence[nn.Parameter]) -> None:
        """Drop tensors with a gradient from the list of those without; ignore steps without any."""
        without = self._without[id(optimizer)]
        trains_policy = optimizer is not self._learner.optimizer or len(learning) > 1  # else only a head warms up
        if not without or not trains_policy:
            return
        before = len(without)
        without -= {id(p) for p in learning if id(p) in without and bool(p.grad.any())}  # type: ignore[union-attr]
        is_empty = len(without) == before and not any(bool(p.grad.any()) for p in learning)  # type: ignore[union-attr]
        self._steps[id(optimizer)] += not is_empty
        if without and self._steps[id(optimizer)] >= _PATIENCE:
            names = [name for key, name in self._names.items() if key in without]
            without.clear()
            self._add_missing(names, f"got no gradient in {_PATIENCE} steps")

    def _add_missing(self, names: Sequence[str], what: str) -> None:
        if names:
            shown = ", ".join(names[:4])
            self._add(f"{len(names)} of {len(self._names)} trainable tensors {what}: {shown}")

    def _add(self, sentence: str) -> None:
        if sentence not in self._errors:
            self._errors.append(sentence)


@torch.no_grad()
def adapter_errors(learner: Learner) -> Iterator[str]:
    """Yield an error unless an adapted layer, another one after each update, is ``W + alpha / rank * B A``."""
    model, config = learner.policy, learner.config.update.lora
    if not isinstance(model, AdaptedModel) or any(map(is_shard, model.parameters())):
        return
    names, scale = sorted(model.adapter_shapes()), config.alpha / config.rank
    name = names[learner.policy_version % len(names)]
    layer: Any = model.base.get_submodule(name.removesuffix(".weight"))
    if not math.isclose(layer.scaling[model.name], scale, rel_tol=1e-6):
        yield f"the adapter of {name} has the scale {layer.scaling[model.name]:.6g}; alpha / rank is {scale:.6g}"
    rows = slice(0, None, max(1, len(layer.lora_B[model.name].weight) // _ROWS))
    up, down = layer.lora_B[model.name].weight[rows].double(), layer.lora_A[model.name].weight.double()
    base = layer.base_layer.weight[rows].double()
    wanted, found = scale * up @ down, MergedState(model)[name][rows].double() - base
    if not float((found - wanted).norm()) <= 1e-2 * float(wanted.norm()) + 2.5e-7 * float(base.norm()):
        ratio = float((found * wanted).sum() / wanted.square().sum().clamp(min=1e-30))
        yield f"the adapter of {name} is merged at {ratio:.3g} times alpha / rank = {scale:.6g}"


def learning_rate_at(config: OptimConfig, highest: float, step: int, *, num_steps: int) -> float:
    """Return the learning rate of a step, counted from 0: linear warm-up, then the schedule to 0 at ``num_steps``."""
    if step < config.warmup_steps:
        return highest * (step + 1) / config.warmup_steps
    done = min(1.0, (step - config.warmup_steps) / max(1, num_steps - config.warmup_steps))
    return (
        highest
        * {"constant": 1.0, "linear": 1.0 - done, "cosine": (1.0 + math.cos(math.pi * done)) / 2.0}[config.schedule]
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Left:
    """Entries after a step, and the number of steps of their moments."""

    where: Numbers
    numbers: Tensor
    steps: list[float]

    @property
    def is_whole(self) -> bool:
        return not any(map(is_shard, self.where.parameters))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Followed:
    """Entries before a step, with all inputs of the step; ``rates``, ``decays`` and ``steps`` per entry."""

    where: Numbers
    start: Tensor
    gradient: Tensor
    first: Tensor
    second: Tensor
    steps: Tensor
    rates: Tensor
    decays: Tensor

    @classmethod
    def of(
        cls, learner: Learner, optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter], *, seed: int
    ) -> _Followed:
        where, config = Numbers.drawn(parameters, seed=seed), _config_of(learner, optimizer)
        states = [optimizer.state.get(p, {}) for p in parameters]
        pairs = list(zip(parameters, states, strict=True))
        each = partial(torch.repeat_interleave, repeats=torch.tensor(where.counts))
        critics = {id(p) for p in learner.value_module.parameters()} if learner.value_module is not None else set()
        rates = [_expected_rate(learner, optimizer, is_critics=id(p) in critics) for p in parameters]
        return cls(
            where=where,
            start=where.numbers(),
            gradient=where.numbers([p.grad for p in parameters if p.grad is not None]),
            first=where.numbers([state["exp_avg"] if state else torch.zeros_like(p) for p, state in pairs]),
            second=where.numbers([state["exp_avg_sq"] if state else torch.zeros_like(p) for p, state in pairs]),
            steps=each(torch.tensor(_steps_of(optimizer, parameters), dtype=torch.float64)),
            rates=each(torch.tensor(rates, dtype=torch.float64)),
            decays=each(torch.tensor([config.weight_decay * (p.ndim >= 2) for p in parameters], dtype=torch.float64)),
        )

    def expected(self, config: OptimConfig) -> Tensor:
        """Return the entries after AdamW's step (Loshchilov and Hutter 2019, algorithm 2), float64."""
        first = config.beta1 * self.first + (1.0 - config.beta1) * self.gradient
        second = config.beta2 * self.second + (1.0 - config.beta2) * self.gradient**2
        steps = self.steps + 1.0
        corrected = first / (1.0 - config.beta1**steps)
        spread = (second / (1.0 - config.beta2**steps)).sqrt() + _EPS
        moved: Tensor = self.start * (1.0 - self.rates * self.decays) - self.rates * corrected / spread
        return moved


def _expected_rate(learner: Learner, optimizer: torch.optim.Optimizer, *, is_critics: bool) -> float:
    config: RlConfig = learner.config
    steps = config.update.num_epochs * config.update.num_minibatches
    highest = config.critic.learning_rate if is_critics else config.learning_rate
    step = learner.policy_version * steps + learner.step_of_update
    return learning_rate_at(_config_of(learner, optimizer), highest, step, num_steps=config.num_iterations * steps)


def _config_of(learner: Learner, optimizer: torch.optim.Optimizer) -> OptimConfig:
    update = learner.config.update.optim
    return update if optimizer is learner.optimizer else learner.config.critic.optim or update


def _learning(learner: Learner) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield every trainable weight: the LoRA, or all of a model except its experts, and the critic's own."""
    yield from _own(learner.policy)
    critic = learner.critic
    if critic is not None:
        yield from ((f"critic.head.{name}", p) for name, p in critic.head.named_parameters())
        if not learner.shares_backbone:
            heads = {id(p) for p in _head_of(critic.backbone)}  # the language head gives no value
            yield from ((f"critic.{name}", p) for name, p in _own(critic.backbone) if id(p) not in heads)


def _own(model: Any) -> Iterator[tuple[str, nn.Parameter]]:
    named: Iterator[tuple[str, nn.Parameter]] = model.named_parameters()
    if isinstance(model, AdaptedModel):
        yield from named
    else:
        yield from ((name, p) for name, p in named if "expert" not in name)


def _head_of(model: Any) -> Iterator[nn.Parameter]:
    if isinstance(model, AdaptedModel):
        return
    first = {id(p) for p in model.get_input_embeddings().parameters()}
    yield from (p for p in model.get_output_embeddings().parameters() if id(p) not in first)


def _steps_of(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> list[float]:
    held = [torch.as_tensor(optimizer.state.get(p, {}).get("step", 0.0)).detach().float().cpu() for p in parameters]
    return torch.stack([each.reshape(()) for each in held]).tolist() if held else []


def _same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


_COUNT = 64  # entries per tensor, up to twice that number


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Numbers:
    """Entries of several tensors at regular distances from a random start."""

    parameters: tuple[nn.Parameter, ...]
    slices: tuple[slice, ...]
    counts: tuple[int, ...]

    @classmethod
    def drawn(cls, parameters: Sequence[nn.Parameter], *, seed: int) -> Numbers:
        stream = generator(seed, "numbers of a step")
        draws = torch.rand(len(parameters), generator=stream, dtype=torch.float64).tolist()
        sizes = [local_part(p).numel() for p in parameters]
        slices = []
        for draw, size in zip(draws, sizes, strict=True):
            apart = max(1, size // _COUNT)
            slices.append(slice(int(draw * apart), size, apart))
        counts = [len(range(size)[each]) for size, each in zip(sizes, slices, strict=True)]
        return cls(parameters=tuple(parameters), slices=tuple(slices), counts=tuple(counts))

    def numbers(self, of: Sequence[Tensor] | None = None) -> Tensor:
        """Return the entries as one vector, float64 on the CPU; ``of``: read other tensors of the same shapes."""
        tensors = self.parameters if of is None else of
        entries = [local_part(each).flatten()[index] for each, index in zip(tensors, self.slices, strict=True)]
        return torch.cat(entries).double().cpu()

    def differing(self, numbers: Tensor) -> list[int]:
        """Return the indices of the tensors whose entries differ from ``numbers``."""
        pairs = zip(*(torch.split(each, list(self.counts)) for each in (self.numbers(), numbers)), strict=True)
        return [index for index, (now, then) in enumerate(pairs) if not torch.equal(now, then)]

    def worst(self, found: Tensor, expected: Tensor, start: Tensor) -> tuple[nn.Parameter, float, float, float] | None:
        """Return the tensor with the largest error: its actual and expected change, and the error; or None.

        Half a unit in the last place of the new weight is rounding.
        """
        wrong = list[tuple[float, nn.Parameter, float, float, float]]()
        columns = [torch.split(each, list(self.counts)) for each in (found, expected, start)]
        for parameter, now, wanted, then in zip(self.parameters, *columns, strict=True):
            distance, size = float((now - wanted).norm()), float((wanted - then).norm())
            bound = 1e-2 * size + 2.5e-7 * float(wanted.norm())
            if not distance <= bound:
                wrong.append((distance / max(bound, 1e-30), parameter, float((now - then).norm()), size, distance))
        return max(wrong, key=lambda row: row[0])[1:] if wrong else None


def local_part(tensor: Tensor) -> Tensor:
    """Return the tensor, or this rank's shard of it, detached."""
    found: Tensor = tensor.to_local() if is_shard(tensor) else tensor  # type: ignore[attr-defined]
    return found.detach()


_TENSORS = 32  # tensors compared between backward pass and step
_NUMBERS = 256  # entries per tensor
_CLOSE = 1e-3


class GradientChecker:
    """Checker that compares gradients of random tensors after the backward passes and before the step.

    They may differ by one common factor, that of clipping. For a sharded model, or on several ranks, gradients are sums
    over ranks, so only the norm is checked.
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
