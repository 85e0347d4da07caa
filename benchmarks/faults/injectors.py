"""Parts of faults. Each replaces functions of rlcore until a stack is closed."""

from __future__ import annotations

import itertools
import pkgutil
import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from inspect import signature
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.faults.lab import scratch
from rlcore.algorithms.kl import KL_LOSSES
from rlcore.distributed import rank_pool
from rlcore.text.tokenization import ChatTokenizer
from rlcore.training.learner import Learner
from rlcore.training.optim import clip_gradient
from rlcore.types import Score

Turn = Callable[[Any], Any]
Inject = Callable[[ExitStack], Any]


def at(place: str, change: Callable[..., Any]) -> Inject:
    """Replace the function at ``module:name`` by ``change(right function, *arguments)``."""
    owner, _, name = (place if "." in place.partition(":")[2] else place.replace(":", ":.")).rpartition(".")

    def inject(stack: ExitStack) -> None:
        home = pkgutil.resolve_name(f"rlcore.{owner}")
        old = getattr(home, name)
        stack.enter_context(patch.object(home, name, lambda *given, **more: change(old, *given, **more)))

    return inject


def out(place: str, turn: Turn) -> Inject:
    """Change what a function returns."""
    return at(place, lambda old, *given, **more: turn(old(*given, **more)))


def arg(place: str, **turns: Turn) -> Inject:
    """Change some arguments of a function."""

    def change(old: Any, *given: Any, **more: Any) -> Any:
        bound = signature(old).bind(*given, **more)
        bound.arguments.update({name: turn(bound.arguments[name]) for name, turn in turns.items()})
        return old(*bound.args, **bound.kwargs)

    return at(place, change)


def fresh(make: Callable[[], Inject]) -> Inject:
    """Make a transformation with memory anew for each run."""
    return lambda stack: make()(stack)


def both(*injects: Inject) -> Inject:
    """Inject all of them."""
    return lambda stack: [one(stack) for one in injects]


def fields(**turns: Turn) -> Turn:
    """Change some fields of a dataclass."""
    return lambda one: replace(one, **{name: turn(getattr(one, name)) for name, turn in turns.items()})


def each(**turns: Turn) -> Turn:
    """Change some fields of every item."""
    return lambda them: list(map(fields(**turns), them))


def copied(**sources: str) -> Turn:
    """Fill some tensors of every item from its others."""
    return lambda them: [replace(one, **{to: getattr(one, of).clone() for to, of in sources.items()}) for one in them]


def always(value: Any) -> Callable[..., Any]:
    """Return the value, whatever is given."""
    return lambda *_, **__: value


def times(factor: float) -> Turn:
    """Multiply."""
    return lambda value: factor * value


def moved_on(them: Sequence[Any]) -> list[Any]:
    """Replace each item by the one before it."""
    return [them[-1], *them[:-1]]


def shuffled(them: Sequence[Any]) -> list[Any]:
    """Shuffle the items."""
    return random.Random(len(them)).sample(them, len(them))


def since(first: int, turn: Turn) -> Turn:
    """Change what comes from the call with the number ``first`` on."""
    calls = itertools.count(1)
    return lambda them: turn(them) if next(calls) >= first else them


def one_behind() -> Turn:
    """Return what was given the time before."""
    kept: list[Any] = []

    def turn(given: Any) -> Any:
        kept.append(given)
        return kept[-2] if len(kept) > 1 else given

    return turn


def scores(change: Turn) -> Inject:
    """Change the scores of the training reward."""

    def turn(groups: Any) -> Any:
        found = iter(change([one.score for group in groups for one in group]))
        return [[replace(one, score=next(found)) for one in group] for group in groups]

    return out("loop.rollouts:score_groups", turn)


def valued(turn: Turn) -> Turn:
    """Change the total of each score."""
    return each(value=lambda value: None if value is None else turn(value))


def whole(turn: Turn) -> Turn:
    """Change the total and the terms of each score."""
    terms = each(terms=lambda them: {name: turn(value) for name, value in them.items()})
    return lambda them: terms(valued(turn)(them))


def samples(change: Turn) -> Inject:
    """Change the training samples of an iteration."""
    return out("loop.update:build_experience", fields(samples=lambda them: tuple(change(list(them)))))


def before(name: str) -> Turn:
    """Use the field of the previous sample, its first number for every token."""
    return lambda them: [
        replace(one, **{name: torch.full_like(getattr(one, name), float(getattr(other, name)[0]))})
        for one, other in zip(them, moved_on(them), strict=True)
    ]


def mask_at(place: int) -> Turn:
    """Mask one token."""
    return lambda mask: mask if len(mask) < 2 else mask.index_fill(0, torch.tensor([place % len(mask)]), False)


def rollouts(change: Turn) -> Inject:
    """Change the rollouts that the engine returns."""
    return out("sampling.native:NativeSampler._rollouts", lambda them: iter(change(list(them))))


def engine_groups(change: Turn) -> Inject:
    """Change the engine's groups of several completions."""

    def sample(old: Any, self: Any, prompts: Any, params: Any, **more: Any) -> Any:
        made = old(self, prompts, params, **more)
        return change(made) if params.num_samples > 1 else made

    return at("sampling.native:NativeSampler.sample", sample)


def turns(choose: Callable[[Any, int, list[Any]], list[Any]]) -> Inject:
    """Choose the prompts of an iteration, given its number and the right ones."""
    place = "loop.prompt_schedule:PromptSchedule.prompts_for"
    return at(place, lambda old, self, number: choose(self._prompts, number, old(self, number)))


def learner_gets(change: Turn) -> Inject:
    """Change the samples after the audit."""
    return arg("training.local_learner:LocalLearner.update", samples=lambda them: tuple(change(list(them))))


def update_gets(change: Turn) -> Inject:
    """Change the samples at the start of an update."""
    return arg("training.learner:Learner.update", samples=lambda them: change(list(them)))


def drawing(sharpen: Turn, reported: Callable[[Any, float], Any] = lambda logits, heat: logits / heat) -> Inject:
    """Sample from changed tempered logits, and report the log-probabilities of others."""

    def draw(old: Any, logits: torch.Tensor, uniforms: torch.Tensor, *, temperature: float) -> Any:
        tokens, _ = old(sharpen(logits / temperature), uniforms, temperature=1.0)
        return tokens, reported(logits, temperature).log_softmax(-1).gather(-1, tokens[:, None])[:, 0]

    return at("sampling.native:sample_tokens", draw)


def top_k(count: int) -> Turn:
    """Keep the most likely tokens only."""
    return lambda logits: logits.masked_fill(logits < logits.topk(count).values[:, -1:], -torch.inf)


def top_p(mass: float) -> Turn:
    """Keep the most likely tokens up to a fraction of the mass."""

    def cut(logits: torch.Tensor) -> torch.Tensor:
        chances, order = logits.softmax(-1).sort(descending=True)
        dropped = chances.cumsum(-1) - chances > mass
        return logits.masked_fill(dropped.gather(-1, order.argsort(-1)), -torch.inf)

    return cut


def likelier(text: str, by: float) -> Turn:
    """Raise the log-odds of the token of ``text``, or of the ends, by this number of nats."""

    def lifted(logits: torch.Tensor) -> torch.Tensor:
        tokenizer, found = ChatTokenizer.load(scratch()), logits.clone()
        found[:, list(tokenizer.encode(text) if text else tokenizer.eos_ids)] += by
        return found

    return lifted


def same_draws(count: int) -> Inject:
    """Use the same random numbers for ``count`` completions of a group."""
    return arg("sampling.native:_uniforms", block=each(sample_index=lambda index: index // count))


def without(word: str) -> Inject:
    """Keep the first values of some tensors in the engine."""
    first: dict[str, torch.Tensor] = {}

    def load(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: first.setdefault(name, value) if word in name else value for name, value in state.items()}

    return loading(load)


def loading(change: Turn) -> Inject:
    """Change the weights that the engine receives."""
    place = "sampling.native:NativeSampler.load_weights"
    return arg(place, state=lambda state: change({name: state[name].clone() for name in state}))


def algorithm(**turns: Turn) -> Inject:
    """Change the ratio or surrogate of the algorithm's loss."""
    return arg("training.losses:policy_loss", algorithm=fields(**turns))


def surrogate(change: Callable[..., Any]) -> Inject:
    """Change the surrogate, given its inputs and the right one."""
    return algorithm(surrogate=lambda right: lambda *given: change(right, *given))


def inputs(**turns: Turn) -> Inject:
    """Change the inputs of the policy's loss."""
    return arg("training.losses:policy_loss", inputs=fields(**turns))


def terms(change: Callable[[Any, torch.Tensor], Any]) -> Inject:
    """Change the loss of each token, given it and the log-probabilities."""
    place = "training.losses:PolicyTerms.__call__"
    return at(place, lambda old, self, at, logprobs, *rest: change(old(self, at, logprobs, *rest), logprobs))


def weights_of_tokens(change: Turn) -> Inject:
    """Change the weight of each token."""
    return out("training.learner:token_weights", lambda them: list(map(change, them)))


def coefficients(**values: Any) -> Inject:
    """Change the coefficients of the loss's terms."""
    right = Learner.__dict__["_coefficients"].fget
    changed = property(lambda self: replace(right(self), **values))
    return lambda stack: stack.enter_context(patch.object(Learner, "_coefficients", changed))


def kl_losses(turn: Callable[[str, Any], Any]) -> Inject:
    """Replace the estimators of the KL in the loss, given their names and functions."""
    known = {name: turn(name, right) for name, right in KL_LOSSES.items()}
    return lambda stack: stack.enter_context(patch("rlcore.algorithms.objective.KL_LOSSES", known))


def kl_sums(name: str, factor: float) -> Inject:
    """Multiply a sum of the loss's KL."""
    turn = fields(sums=lambda sums: {key: value * (factor if key == name else 1.0) for key, value in sums.items()})
    return out("training.losses:policy_loss", turn)


def next_values(change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Inject:
    """Change the values beyond the ends, given these and the last values."""

    def turn(made: Any) -> Any:
        return replace(made, next_values=change(made.next_values, torch.stack([one[-1] for one in made.values])))

    return out("training.scoring_models:ScoringModels.passes", turn)


def gradients(change: Callable[[list[Any]], Any]) -> Inject:
    """Change the gradients of parameters between the loss and the step."""

    def clip(old: Any, parameters: Any, **settings: Any) -> Any:
        listed = list(parameters)
        change([one for one in listed if one.grad is not None])
        return old(listed, **settings)

    return at("training.learner:clip_gradient", clip)


def stepping(change: Turn) -> Inject:
    """Change an optimizer before each of its steps."""
    return at("training.learner:take_step", lambda old, optimizer: (change(optimizer), old(optimizer)))


def groups(**values: Any) -> Turn:
    """Change settings of the optimizer."""
    return lambda optimizer: [group.update(values) for group in optimizer.param_groups]


def around(method: str, change: Callable[[torch.Tensor, torch.Tensor], Any], word: str = "") -> Inject:
    """Change the policy's tensors of a name after a method of the learner, given their earlier values."""

    def call(old: Any, self: Learner, *given: Any, **more: Any) -> Any:
        first = {name: parameter.detach().clone() for name, parameter in self.policy.named_parameters()}
        made = old(self, *given, **more)
        with torch.no_grad():
            for name, parameter in self.policy.named_parameters():
                if word in name:
                    change(parameter, first[name])
        return made

    return at(f"training.learner:Learner.{method}", call)


def slower(word: str, factor: float) -> Inject:
    """Reduce the steps of tensors of a name."""
    return around("_take_steps", lambda now, first: now.copy_(first + factor * (now - first)), word)


def penalised() -> Inject:
    """Lower the logits of tokens that a completion has already."""
    seen: list[torch.Tensor] = []

    def draw(old: Any, logits: torch.Tensor, uniforms: torch.Tensor, *, temperature: float) -> Any:
        if not seen or len(seen[0]) != len(logits):
            seen[:] = [torch.zeros_like(logits, dtype=torch.bool)]
        tempered = logits / temperature
        lowered = torch.where(tempered > 0, tempered / 1.5, tempered * 1.5)
        tokens, _ = old(torch.where(seen[0], lowered, tempered), uniforms, temperature=1.0)
        seen[0][torch.arange(len(tokens)), tokens] = True
        return tokens, tempered.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]

    return at("sampling.native:sample_tokens", draw)


def greedy_at_first(choose: Any) -> Any:
    """Take the likeliest token in the first draw."""
    calls = itertools.count()

    def chosen(logits: torch.Tensor, uniforms: torch.Tensor) -> Any:
        found, tokens = choose(logits, uniforms), logits.argmax(-1)
        return found if next(calls) else (tokens, logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0])

    return chosen


def repeated() -> Inject:
    """Give the scores of the first iteration again and again."""
    first: list[Any] = []

    def change(them: list[Any]) -> list[Any]:
        first.extend([] if first else them)
        return [first[place % len(first)] for place in range(len(them))]

    return scores(change)


def gradient_kept() -> Inject:
    """Add each gradient to the next one too."""
    kept: dict[int, torch.Tensor] = {}

    def change(them: list[Any]) -> None:
        for one in them:
            found = one.grad.clone()
            one.grad.add_(kept.get(id(one), torch.zeros_like(found)))
            kept[id(one)] = found

    return gradients(change)


def divided() -> Inject:
    """Divide losses by the number of micro-batches."""
    counts: list[int] = []
    add = arg("training.learner:add_gradient", loss=lambda loss: loss / max(1, counts[-1]))
    return both(out("training.learner:pack_for", lambda made: counts.append(len(made)) or made), add)


def clipped_too_early() -> Inject:
    """Clip the gradient after each micro-batch."""
    policies: list[Any] = []

    def accumulate(old: Any, self: Any, *given: Any) -> Any:
        policies[:] = [self.policy]
        return old(self, *given)

    def add(old: Any, *given: Any, **more: Any) -> None:
        old(*given, **more)
        clip_gradient(policies[0].parameters(), max_grad_norm=0.05)

    return both(at("training.learner:Learner._accumulate", accumulate), at("training.learner:add_gradient", add))


def later_steps(change: Any) -> Inject:
    """Change an optimizer before all steps of an update but the first."""
    count = itertools.count(1)
    return stepping(lambda optimizer: change(optimizer) if next(count) % 4 != 1 else None)


def every_second_step() -> Inject:
    """Leave out every second step."""
    count = itertools.count(1)
    clear = {"set_to_none": True}
    return at("training.learner:take_step", lambda old, it: old(it) if next(count) % 2 else it.zero_grad(**clear))


def encoded(change: Any) -> Any:
    """Change the samples of an update on their way to the ranks."""

    def encode(old: Any, value: Any) -> bytes:
        method, (given, *others), settings = value[0], value[1] or (None,), value[2]
        changed = (method, (tuple(change(list(given))), *others), settings) if method == "update" else value
        return bytes(old(changed))

    return encode


def second_rank(old: Any, self: rank_pool.RankPool, method: str, *given: Any, **settings: Any) -> Any:
    """Send the second rank other samples."""
    end = self.transport._ends[1]
    send, others = end.send_bytes, encoded(before("advantages"))(rank_pool.encode, (method, given, settings))
    end.send_bytes = lambda data: send(others)
    try:
        return old(self, method, *given, **settings)
    finally:
        end.send_bytes = send


def remembered_by_text() -> Inject:
    """Let the verifier remember texts, and not prompts."""
    known: dict[str, Score] = {}

    def call(old: Any, self: Any, rollouts: Any) -> Any:
        found = old(self, rollouts)
        return [known.setdefault(one.text, score) for one, score in zip(rollouts, found, strict=True)]

    return at("rewards.math_answer:MathReward.__call__", call)


def contains(old: Any, self: Any, rollouts: Any) -> list[Score]:
    """Score a text that contains the reference."""
    values = [float(one.prompt.reference in one.text) for one in rollouts]
    return [Score(value=value, terms={"math": value}) for value in values]


def graded_with_others(old: Any, self: Any, rollouts: Any) -> Any:
    """Leave each rollout the reference of another prompt."""
    for place, rollout in enumerate(rollouts):
        other = rollouts[(place + 4) % len(rollouts)].prompt.reference
        object.__setattr__(rollout, "prompt", replace(rollout.prompt, reference=other))
    return old(self, rollouts)


def tokens_of_the_one_before(them: list[Any]) -> list[Any]:
    """Use the tokens of the previous sample, if it is as long."""
    return [
        replace(a, completion_ids=b.completion_ids) if len(a.completion_ids) == len(b.completion_ids) else a
        for a, b in zip(them, moved_on(them), strict=True)
    ]


def last_layer_alone(old: Any, pairs: Any, config: Any) -> Any:
    """Train the last layer and the head."""
    for name, parameter in (one for module, _ in pairs for one in module.named_parameters()):
        parameter.requires_grad_("layers.1" in name or "head" in name)
    return old(pairs, config)
