"""Faults of the engine, the models, the losses and the optimizer's steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from rlcore.training.policy_terms import PolicyTerms

from benchmarks.faults.lab import Patches
from rlcore.algorithms import kl as kl_module
from rlcore.algorithms import objective
from rlcore.models import policy as policy_module
from rlcore.rewards.user_function import FunctionReward
from rlcore.sampling import native
from rlcore.sampling.native import NativeSampler
from rlcore.training import building, experience, judges, learner, losses, minibatches, value_terms
from rlcore.training import optim as optim_module
from rlcore.training.learner import Learner

Inject = Callable[[Patches], None]


def drawing(sharpen: Callable[[torch.Tensor], torch.Tensor]) -> Inject:
    """The engine draws from other logits than it reports log-probabilities of."""

    def inject(patch: Patches) -> None:
        def draw(logits: torch.Tensor, uniforms: torch.Tensor, *, temperature: float) -> Any:
            tokens, _ = old(sharpen(logits / temperature), uniforms, temperature=1.0)
            return tokens, (logits / temperature).log_softmax(-1).gather(-1, tokens[:, None])[:, 0]

        old = patch.set(native, "draw", draw)

    return inject


def top_k(count: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda logits: logits.masked_fill(logits < logits.topk(count).values[:, -1:], -torch.inf)


def top_p(share: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def cut(logits: torch.Tensor) -> torch.Tensor:
        chances, order = logits.softmax(-1).sort(descending=True)
        dropped = chances.cumsum(-1) - chances > share
        return logits.masked_fill(dropped.gather(-1, order.argsort(-1)), -torch.inf)

    return cut


def banned(token: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda logits: logits.index_fill(1, torch.tensor([token]), -torch.inf)


def likelier(token: int, by: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def lifted(logits: torch.Tensor) -> torch.Tensor:
        found = logits.clone()
        found[:, token] += by
        return found

    return lifted


def reporting(change: Callable[[torch.Tensor, float], torch.Tensor]) -> Inject:
    """The engine draws as it should, and reports other log-probabilities."""

    def inject(patch: Patches) -> None:
        def draw(logits: torch.Tensor, uniforms: torch.Tensor, *, temperature: float) -> Any:
            tokens, _ = old(logits, uniforms, temperature=temperature)
            return tokens, change(logits, temperature).log_softmax(-1).gather(-1, tokens[:, None])[:, 0]

        old = patch.set(native, "draw", draw)

    return inject


def loading(change: Callable[[dict[str, torch.Tensor], int], dict[str, torch.Tensor] | None]) -> Inject:
    """Change what arrives of new weights; None: nothing does, but for the version."""

    def inject(patch: Patches) -> None:
        def load(self: NativeSampler, state: Any, *, policy_version: int) -> None:
            found = change({name: state[name] for name in state}, policy_version)
            if found is None:
                self.policy_version = policy_version
            else:
                old(self, found, policy_version=policy_version)

        old = patch.set(NativeSampler, "load_weights", load)

    return inject


def half_of_it(state: dict[str, torch.Tensor], version: int) -> dict[str, torch.Tensor]:
    first = _FIRST.setdefault("state", {name: value.clone() for name, value in state.items()})
    return {name: first[name] if "layers.1" in name else value for name, value in state.items()}


_FIRST: dict[str, dict[str, torch.Tensor]] = {}


def prompts_moved_on(patch: Patches) -> None:
    """The engine completes each prompt's neighbour."""

    def decode(model: Any, prompts: Any, *rest: Any, **more: Any) -> Any:
        return old(model, [*prompts[4:], *prompts[:4]], *rest, **more)

    old = patch.set(native, "decode", decode)


def same_draws(patch: Patches) -> None:
    """Every completion of a group has the same random numbers."""

    def uniforms(block: Any, num_tokens: int, *, seed: int) -> torch.Tensor:
        return old([dataclasses.replace(request, sample_index=0) for request in block], num_tokens, seed=seed)

    old = patch.set(native, "_uniforms", uniforms)


def same_seed(patch: Patches) -> None:
    """Every iteration has the same random numbers."""
    old = patch.set(native, "_uniforms", lambda block, num_tokens, *, seed: old(block, num_tokens, seed=7))


def inputs(**turns: Callable[[Any], Any]) -> Inject:
    """Change what the policy's loss is made of."""

    def inject(patch: Patches) -> None:
        def made(given: Any, *rest: Any) -> Any:
            return old(dataclasses.replace(given, **{n: turn(getattr(given, n)) for n, turn in turns.items()}), *rest)

        old = objective.policy_loss
        patch.set(__import__("rlcore.training.policy_terms", fromlist=["x"]), "policy_loss", made)

    return inject


def coefficients(**values: Any) -> Inject:
    """Other coefficients of the loss's terms than the run asks for."""

    def inject(patch: Patches) -> None:
        made = Learner.__dict__["_coefficients"].fget
        patch.set(Learner, "_coefficients", property(lambda self: dataclasses.replace(made(self), **values)))

    return inject


def gradients(change: Callable[[list[torch.nn.Parameter]], None]) -> Inject:
    """Change the gradient between the loss and the step."""

    def inject(patch: Patches) -> None:
        def clip(parameters: Any, **settings: Any) -> float:
            listed = list(parameters)
            change([parameter for parameter in listed if parameter.grad is not None])
            return float(old(listed, **settings))

        old = patch.set(learner, "clip_gradient", clip)

    return inject


def negated(them: list[torch.nn.Parameter]) -> None:
    for parameter in them:
        parameter.grad.neg_()  # type: ignore[union-attr]


def zeroed(them: list[torch.nn.Parameter]) -> None:
    for parameter in them:
        parameter.grad.zero_()  # type: ignore[union-attr]


def first_half_zeroed(them: list[torch.nn.Parameter]) -> None:
    zeroed(them[: len(them) // 2])


def not_clipped(patch: Patches) -> None:
    old = patch.set(
        learner,
        "clip_gradient",
        lambda parameters, *, max_grad_norm, scale=1.0: old(parameters, max_grad_norm=1e9, scale=scale),
    )


def stepping(change: Callable[[torch.optim.Optimizer], None], *, after: bool = False) -> Inject:
    """Change an optimizer before, or weights after, each of its steps."""

    def inject(patch: Patches) -> None:
        def take(optimizer: torch.optim.Optimizer) -> None:
            if not after:
                change(optimizer)
            old(optimizer)
            if after:
                change(optimizer)

        old = patch.set(learner, "take_step", take)

    return inject


def groups(**values: Any) -> Callable[[torch.optim.Optimizer], None]:
    def change(optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            group.update(values)

    return change


def decayed(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        group["weight_decay"] = 5.0


def forgets_moments(optimizer: torch.optim.Optimizer) -> None:
    optimizer.state.clear()


@torch.no_grad()
def disturbed(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.add_(1e-3 * torch.ones_like(parameter))


def last_layer_alone(patch: Patches) -> None:
    def make(pairs: Any, config: Any) -> Any:
        for module, _ in pairs:
            for name, parameter in module.named_parameters():
                parameter.requires_grad_("layers.1" in name or "head" in name)
        return old(pairs, config)

    old = patch.set(learner, "make_optimizer", make)


def stuck_schedule(patch: Patches) -> None:
    patch.set(learner, "seek", lambda scheduler, step: optim_module.seek(scheduler, step + 40))


def twice(patch: Patches) -> None:
    """Each update is done twice."""

    def update(self: Learner, samples: Any, *, seed: int) -> Any:
        old(self, samples, seed=seed)
        return old(self, samples, seed=seed)

    old = patch.set(Learner, "update", update)


def no_update(patch: Patches) -> None:
    """The version is counted on, and nothing is learned."""
    patch.set(Learner, "_step", lambda self, samples, totals: totals)


def weights_of_tokens(change: Callable[[torch.Tensor], torch.Tensor]) -> Inject:
    def inject(patch: Patches) -> None:
        old = patch.set(learner, "token_weights", lambda *given: [change(each) for each in old(*given)])

    return inject


def temperature_ignored(patch: Patches) -> None:
    """Trainer and canary score at temperature 1, whatever is asked for."""
    for module in (policy_module,):
        for name in ("state_logprobs", "state_scores"):
            old = getattr(module, name)
            patch.set(module, name, lambda *given, _old=old, temperature=1.0, **more: _old(*given, **more))


def visible_neighbours(patch: Patches) -> None:
    """Completions of one row see each other."""
    from rlcore.models import tree_attention

    def layout(segment: torch.Tensor) -> Any:
        return old(segment.masked_fill(segment > 0, 1))

    old = patch.set(tree_attention, "layout_of", layout)
    patch.set(policy_module, "layout_of", layout)


def reference_learns(patch: Patches) -> None:
    """The reference is the policy's own weights."""

    def others(plan: Any, policy: Any, runtime: Any) -> Any:
        critic, reference = old(plan, policy, runtime)
        return critic, policy if reference is not None else None

    old = patch.set(building, "_others", others)


def critic_idle(patch: Patches) -> None:
    patch.set(
        losses,
        "critic_loss",
        lambda columns, predicted, config, totals: 0.0 * value_terms.critic_loss(columns, predicted, config, totals),
    )


def critic_wrong(patch: Patches) -> None:
    """The critic's loss is of its values one token on."""
    old = value_terms.critic_loss
    patch.set(
        losses,
        "critic_loss",
        lambda columns, predicted, config, totals: old(columns, predicted.roll(1), config, totals),
    )


def values_shifted(patch: Patches) -> None:
    old = patch.set(judges, "score_values", lambda *given, **more: [each.roll(1) for each in old(*given, **more)])


def kl_turned(patch: Patches) -> None:
    losses_of = dict(kl_module.KL_LOSSES)
    patch.set(objective, "KL_LOSSES", {n: (lambda d, r, f=f: -f(d, r)) for n, f in losses_of.items()})


def surrogate(change: Callable[[Any, torch.Tensor], Any]) -> Inject:
    """Change the surrogate of each token."""

    def inject(patch: Patches) -> None:
        def call(self: PolicyTerms, places: slice, logprobs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
            return change(old(self, places, logprobs, entropy), logprobs)

        old = patch.set(PolicyTerms, "__call__", call)

    return inject


def last_microbatch_lost(patch: Patches) -> None:
    old = patch.set(learner, "pack_for", lambda *given, **more: old(*given, **more)[:-1] or old(*given, **more))


def columns_moved(patch: Patches) -> None:
    """A micro-batch's fields are of the sequences before."""

    def get(self: minibatches.Columns, name: str) -> torch.Tensor:
        found = old(self, name)
        return found.roll(1) if name == "advantages" else found

    old = patch.set(minibatches.Columns, "get", get)


assert experience and FunctionReward

WHILE: dict[str, tuple[str, Inject]] = {
    "the engine draws at half the temperature it reports": ("grpo", drawing(lambda logits: logits / 0.5)),
    "the engine draws at 0.8 of the temperature it reports": ("grpo", drawing(lambda logits: logits / 0.8)),
    "the engine draws at 1.3 times the temperature it reports": ("grpo", drawing(lambda logits: logits / 1.3)),
    "the engine draws greedily, and reports as if it drew": ("grpo", drawing(lambda logits: 50.0 * logits)),
    "the engine draws of the 2 likeliest tokens": ("grpo", drawing(top_k(2))),
    "the engine draws of the likeliest 0.8": ("grpo", drawing(top_p(0.8))),
    "the engine draws all tokens alike": ("grpo", drawing(torch.zeros_like)),
    "the engine never draws an end": ("grpo", drawing(banned(2))),
    "the engine draws one token twice as often": ("grpo", drawing(likelier(ord("1") + 3, 0.7))),
    "the engine reports log-probabilities at temperature 1": (
        "grpo, temperature 0.7",
        reporting(lambda logits, temperature: logits),
    ),
    "the engine reports log-probabilities of a flatter model": (
        "grpo",
        reporting(lambda logits, temperature: 0.97 * logits / temperature),
    ),
    "the engine takes the version, and no weights": ("grpo", loading(lambda state, version: None)),
    "the engine takes the weights of a part": ("grpo", loading(half_of_it)),
    "the engine takes weights times 1.01": (
        "grpo",
        loading(lambda state, version: {name: 1.01 * value for name, value in state.items()}),
    ),
    "the engine completes each prompt's neighbour": ("grpo", prompts_moved_on),
    "a group's completions have the same random numbers": ("grpo", same_draws),
    "every iteration has the same random numbers": ("grpo", same_seed),
    "the loss climbs": ("grpo", surrogate(lambda loss, _: -loss)),
    "the loss is halved": ("grpo", surrogate(lambda loss, _: 0.5 * loss)),
    "the loss forgets advantages": ("grpo", inputs(advantages=torch.ones_like)),
    "advantages negated within the loss": ("grpo", inputs(advantages=lambda value: -value)),
    "advantages of the sequences before, within the loss": ("grpo", columns_moved),
    "the loss forgets the mask": ("grpo, one iteration ahead", inputs(loss_mask=torch.ones_like)),
    "the loss has a bonus for entropy that nobody asked for": ("grpo", coefficients(entropy=0.05)),
    "the KL is left out of the loss": ("grpo, KL in the loss", coefficients(kl=0.0)),
    "the KL is ten times as strong": ("grpo, KL in the loss", coefficients(kl=1.0)),
    "the KL's sign is turned": ("grpo, KL in the loss", kl_turned),
    "tokens weigh twice as much": ("grpo", weights_of_tokens(lambda weights: 2.0 * weights)),
    "all tokens weigh the same, not all sequences": (
        "grpo",
        weights_of_tokens(lambda weights: torch.where(weights > 0, 0.01, 0.0)),
    ),
    "the last micro-batch is lost": ("grpo", last_microbatch_lost),
    "completions in a row see each other": ("grpo", visible_neighbours),
    "the trainer scores at temperature 1": ("grpo, temperature 0.7", temperature_ignored),
    "the gradient is negated": ("grpo", gradients(negated)),
    "the gradient is zero": ("grpo", gradients(zeroed)),
    "the first half of the weights gets no gradient": ("grpo", gradients(first_half_zeroed)),
    "the gradient is not clipped": ("grpo", not_clipped),
    "the optimizer climbs": ("grpo", stepping(groups(maximize=True))),
    "the learning rate is ten times as high": ("grpo", stepping(groups(lr=1e-2))),
    "the learning rate is zero": ("grpo", stepping(groups(lr=0.0))),
    "weights decay": ("grpo", stepping(decayed)),
    "the optimizer forgets its moments": ("grpo", stepping(forgets_moments)),
    "weights are disturbed after each step": ("grpo", stepping(disturbed, after=True)),
    "only the last layer learns": ("grpo", last_layer_alone),
    "the schedule stands further on": ("grpo, 2 epochs", stuck_schedule),
    "each update is done twice": ("grpo", twice),
    "updates are counted and not done": ("grpo", no_update),
    "the reference learns along": ("grpo, KL in the loss", reference_learns),
    "the critic learns nothing": ("ppo", critic_idle),
    "the critic learns another token's values": ("ppo", critic_wrong),
    "the critic's values are those of the token before": ("ppo", values_shifted),
}
