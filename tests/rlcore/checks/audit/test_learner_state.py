"""Optimizer steps, gradients and what a learner keeps between iterations, recomputed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlcore.algorithms.kl import k3
from rlcore.algorithms.surrogates import clamped_difference
from rlcore.checks.audit.learner_state import arrival_errors, epoch_errors, mean_kl, measure_error
from rlcore.checks.audit.prompt_checks import replacement_errors, row_errors, version_errors
from rlcore.config import CriticConfig, KlConfig, OptimConfig, RlConfig, SamplingConfig, UpdateConfig
from rlcore.loop.prompt_schedule import interleave, replace_groups, unused_prompts
from rlcore.training import learner as learner_module
from rlcore.training import optim
from rlcore.training.audit.loss_formula import kl_sums
from rlcore.training.audit.optimizer_check import OptimizerChecker, learning_rate_at
from rlcore.training.learner import Learner
from rlcore.training.minibatches import digest, digest_of, split_by_group
from rlcore.training.optim import make_optimizer, make_scheduler
from rlcore.training.update_stats import UpdateStats
from rlcore.types import Prompt, ScoredRollout
from tests import strategies
from tests.learners import NO_CORRECTION, make_learner, shared_learner

OPTIM = OptimConfig(weight_decay=0.1, warmup_steps=3, schedule="cosine")

UPDATE = UpdateConfig(num_epochs=2, num_minibatches=2, optim=OPTIM, rollout_correction=NO_CORRECTION)


def errors_of(learner: Learner, updates: int = 1) -> list[str]:
    """Return the checker's findings about some updates, including the construction of the learner."""
    witness, found = OptimizerChecker(learner), list[str]()
    for number in range(updates):
        learner.update(strategies.random_samples(number, dtype=torch.float32), seed=number)
        found += witness.pop_errors()
    return found


TIGHT, LOOSE = (
    UpdateConfig(optim=OptimConfig(max_grad_norm=limit), rollout_correction=NO_CORRECTION) for limit in (1e-3, 1e3)
)


@pytest.mark.parametrize("update", [UPDATE, TIGHT, LOOSE])
@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_correct_steps_have_no_finding(name: str, update: UpdateConfig) -> None:
    assert errors_of(make_learner(name, dtype=torch.float32, update=update, num_iterations=6), updates=6) == []


def test_a_head_on_the_policys_backbone_and_a_critic_that_warms_up_are_left_alone() -> None:
    critic = CriticConfig(architecture="shared", warmup_iterations=12)
    learner = shared_learner(dtype=torch.float32, update=UPDATE, critic=critic, num_iterations=14)
    assert errors_of(learner, updates=14) == []


def climbs(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        group["maximize"] = True
    optim.take_step(optimizer)


def forgets(optimizer: torch.optim.Optimizer) -> None:
    optimizer.state.clear()
    optim.take_step(optimizer)


def takes_every_second() -> Callable[[torch.optim.Optimizer], None]:
    steps = count()
    return lambda optimizer: optim.take_step(optimizer) if next(steps) % 2 else None


def has_a_rate_of_its_own(scheduler: Any, step: int) -> None:
    for group in scheduler.optimizer.param_groups:
        group["lr"] = 0.1


def clips_nothing(parameters: Any, *, max_grad_norm: float, scale: float = 1.0) -> float:
    return optim.clip_gradient(parameters, max_grad_norm=1e9, scale=scale)


def after(change: Callable[[list[Any]], object]) -> Callable[..., float]:
    """Clip after a change of the parameters' gradients."""

    def clip(parameters: Any, **settings: Any) -> float:
        listed = list(parameters)
        change([parameter.grad for parameter in listed if parameter.grad is not None])
        return optim.clip_gradient(listed, **settings)

    return clip


def times(factor: float) -> Callable[..., float]:
    return after(lambda gradients: [gradient.mul_(factor) for gradient in gradients])


ADAMW, BACKWARD = "AdamW at this point of the schedule", "times the gradient of its backward passes"
MIDWAY = "changed between backward pass and step, others did not"
# The function of the learner that is exchanged, for what, the settings, and what the checker says.
FAULTS: dict[str, tuple[str, Any, UpdateConfig, str]] = {
    "climbs": ("take_step", climbs, UPDATE, ADAMW),
    "forgets its moments": ("take_step", forgets, UPDATE, "are of 0 steps, expected 1"),
    "leaves a step out": (
        "take_step",
        takes_every_second(),
        UPDATE,
        "the policy's optimizer took 2 steps since the last update, expected 4",
    ),
    "another rate": ("set_schedule_step", has_a_rate_of_its_own, UPDATE, ADAMW),
    "a late rate": ("set_schedule_step", lambda s, step: optim.set_schedule_step(s, step - step % 4), UPDATE, ADAMW),
    "no clipping": ("clip_gradient", clips_nothing, TIGHT, "the clipping limit is 0.001"),
    "turned": ("clip_gradient", times(-1.0), LOOSE, f"a step has -1 {BACKWARD}"),
    "halved": ("clip_gradient", times(0.5), LOOSE, f"a step has 0.5 {BACKWARD}"),
    "raised": ("clip_gradient", times(3.0), LOOSE, f"a step has 3 {BACKWARD}"),
    "turned and clipped": ("clip_gradient", times(-1.0), TIGHT, BACKWARD),
    "the first tensor": ("clip_gradient", after(lambda gradients: gradients[0].mul_(0.5)), LOOSE, MIDWAY),
    "the last tensor": ("clip_gradient", after(lambda gradients: gradients[-1].mul_(0.5)), LOOSE, MIDWAY),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_step_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, wrong, update, says = FAULTS[name]
    monkeypatch.setattr(learner_module, function, wrong)
    updates = 2 if name == "forgets its moments" else 1
    found = errors_of(make_learner("grpo", dtype=torch.float32, update=update), updates=updates)
    assert says in found[0]


def test_weights_that_no_optimizer_holds_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def last_alone(groups: Any, config: OptimConfig) -> torch.optim.Optimizer:
        ((module, rate),) = groups
        for path, parameter in module.named_parameters():
            parameter.requires_grad_("layers.1" in path)
        return make_optimizer([(module, rate)], config)

    monkeypatch.setattr(learner_module, "make_optimizer", last_alone)
    (found,) = errors_of(make_learner("grpo", dtype=torch.float32, update=UPDATE))
    assert "11 of 20 trainable tensors are in no optimizer: model.embed_tokens.weight, " in found


@pytest.mark.parametrize(("updates", "is_found"), [(2, False), (4, True)])
def test_weights_that_get_no_gradient_are_named_after_ten_steps(updates: int, is_found: bool) -> None:
    learner = make_learner("grpo", dtype=torch.float32, update=UPDATE)
    idle = "model.layers.1.mlp.up_proj.weight"
    dict(learner.policy.named_parameters())[idle].register_hook(torch.zeros_like)
    says = f"1 of 20 trainable tensors got no gradient in 10 steps: {idle}"
    found = errors_of(learner, updates=updates)
    assert len(found) == is_found and all(says in each for each in found)


def test_gradients_that_are_zero_everywhere_count_for_no_step() -> None:
    learner = make_learner("ppo", dtype=torch.float32, update=UPDATE)
    assert learner.critic is not None
    for parameter in learner.critic.parameters():
        parameter.register_hook(torch.zeros_like)
    assert errors_of(learner, updates=4) == []


@pytest.mark.parametrize("word", ["embed_tokens", "model.norm", "layers.0.mlp.down_proj"])
def test_a_tensor_that_stands_still_is_named_whichever_it_is(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Learner._take_steps

    def take(self: Learner, totals: Any) -> None:
        before = {name: parameter.detach().clone() for name, parameter in self.policy.named_parameters()}
        steps(self, totals)
        for name, parameter in self.policy.named_parameters():
            if word in name:
                parameter.data.copy_(before[name])

    monkeypatch.setattr(Learner, "_take_steps", take)
    found = errors_of(make_learner("grpo", dtype=torch.float32, update=UPDATE), updates=3)
    assert any(word in sentence and "changed outside of optimizer steps" in sentence for sentence in found)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_the_rate_by_formula_is_that_of_the_library(schedule: Any) -> None:
    config = OptimConfig(warmup_steps=3, schedule=schedule)
    optimizer = make_optimizer([(torch.nn.Linear(2, 2), 0.5)], config)
    scheduler = make_scheduler(optimizer, config, num_steps=9)
    for step in range(12):
        optim.set_schedule_step(scheduler, step)
        assert learning_rate_at(config, 0.5, step, num_steps=9) == pytest.approx(optimizer.param_groups[0]["lr"])


SAMPLES = strategies.random_samples(3)

LIMITED = UpdateConfig(num_epochs=3, early_stop_kl=0.1, early_stop_ref_kl=0.5)


def test_the_audits_kl_is_that_of_the_formula() -> None:
    logprobs, old, ref = -torch.rand(3, 6, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([True, False, True, True, False, True])
    count, from_old, to_ref = map(float, kl_sums(logprobs, old, ref, mask))
    assert count == 4.0
    assert from_old == pytest.approx(float(k3(clamped_difference(old, logprobs, mask)).sum()), rel=1e-5)
    assert to_ref == pytest.approx(float(k3(clamped_difference(logprobs, ref, mask)).sum()), rel=1e-5)


@pytest.mark.parametrize("apply_to", ["reward", "loss"])
def test_the_kl_that_a_coefficient_follows_is_per_episode(apply_to: Any) -> None:
    config = strategies.rl_config(kl=KlConfig(coefficient=0.1, apply_to=apply_to))
    masks = [sample.loss_mask for sample in SAMPLES]
    gaps = [(each.old_logprobs - each.ref_logprobs)[each.loss_mask].sum() for each in SAMPLES]
    in_loss = 0.02 * sum(int(mask.sum()) for mask in masks) / len(SAMPLES)
    expected = in_loss if apply_to == "loss" else float(sum(gaps)) / len(SAMPLES)
    found = mean_kl(SAMPLES, {"kl/ref": 0.02} if apply_to == "loss" else {}, config)
    assert found == pytest.approx(expected, abs=1e-9)
    assert list(measure_error("the KL", expected, found)) == []
    (error,) = measure_error("the KL", expected / 12.0, found)
    assert str(error).startswith("the KL: expected")
    assert list(measure_error("the KL", math.nan, 0.1))


def stats_of(epochs: int, *kl: tuple[float, float, float]) -> UpdateStats:
    return UpdateStats(policy_version=1, moved=True, metrics={}, arrived=((("",),) * epochs,), epoch_kl=kl)


LOW, OLD, REF, NEAR = (10.0, 0.5, 1.0), (10.0, 1.2, 1.0), (10.0, 0.5, 6.0), (10.0, 1.00005, 1.0)


@pytest.mark.parametrize(
    ("done", "kl", "expected"),
    [
        (3, (LOW, LOW, OLD), ""),
        (2, (LOW, OLD), ""),
        (1, (REF,), ""),
        (2, (LOW, NEAR), ""),  # rounding decides
        (3, (LOW, NEAR, LOW), ""),
        (1, (LOW,), "more than 1 of 3, found 1"),
        (3, (LOW, OLD, LOW), "expected 2, found 3"),
        (2, (REF, LOW), "expected 1, found 2"),
        (1, (), "more than 1 of 3, found 1"),  # nothing was measured
    ],
)
def test_an_update_ends_with_the_first_epoch_over_a_limit_or_the_last(
    done: int, kl: tuple[tuple[float, float, float], ...], expected: str
) -> None:
    found = [str(error) for error in epoch_errors(stats_of(done, *kl), LIMITED)]
    assert len(found) == bool(expected)
    assert expected in "".join(found)


def test_without_a_limit_every_epoch_is_done() -> None:
    assert list(epoch_errors(stats_of(2), UpdateConfig(num_epochs=2))) == []
    (error,) = epoch_errors(stats_of(1), UpdateConfig(num_epochs=2))
    assert "no limit is set: expected more than 1 of 2, found 1" in str(error)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_minibatches_are_those_of_each_epochs_own_shuffle(count: int) -> None:
    samples = [dataclasses.replace(each, group=number // 2) for number, each in enumerate(SAMPLES * 2)]
    update, digests = (
        UpdateConfig(num_epochs=3, num_minibatches=count),
        [(each.group, digest(each)) for each in samples],
    )

    def errors(*epochs: int) -> list[str]:
        batches = [split_by_group(samples, count, seed=5, epoch=epoch) for epoch in epochs]
        arrived = ((tuple(tuple(map(digest_of, each)) for each in batches)),)
        stats = UpdateStats(policy_version=1, moved=True, metrics={}, arrived=arrived)
        return [str(error) for error in arrival_errors(stats, digests, update, seed=5)]

    assert errors(0, 1, 2) == []
    if count > 1:
        assert "of epoch 2 are not" in errors(0, 0, 2)[0]


def prompts(count: int) -> list[Prompt]:
    return [
        Prompt(prompt_id=f"p{n}", messages=(), token_ids=(n,), reference=str(n), task="t", dataset="ab"[n % 2])
        for n in range(count)
    ]


def group(prompt: Prompt, *rewards: float) -> list[ScoredRollout]:
    made = [strategies.scored_rollout(value) for value in rewards]
    return [dataclasses.replace(each, rollout=dataclasses.replace(each.rollout, prompt=prompt)) for each in made]


def dynamic(config: RlConfig, weights: dict[str, float]) -> Any:
    return SimpleNamespace(config=config, prompts=prompts(12), mixture_weights=weights, seed=3)


@pytest.mark.parametrize("weights", [{}, {"a": 2.0, "b": 1.0}])
@pytest.mark.parametrize("equal", [{"p0", "p2"}, {f"p{n}" for n in range(9)}, set()])
def test_every_round_of_dynamic_sampling_is_recomputed(equal: set[str], weights: dict[str, float]) -> None:
    config = strategies.rl_config("dapo", sampling=SamplingConfig(max_new_tokens=8, dynamic_sampling_rounds=2))
    components, scheduled = dynamic(config, weights), prompts(4)
    unused = unused_prompts(components.prompts, {each.prompt_id for each in scheduled}, seed=3, iteration=7)
    fresh = interleave(unused, weights) if weights else iter(unused)

    def drawn(chosen: list[Prompt]) -> list[list[ScoredRollout]]:
        return [group(each, 1.0, 1.0 if each.prompt_id in equal else 0.0) for each in chosen]

    def has_signal(made: list[ScoredRollout]) -> bool:
        return made[0].score.value != made[1].score.value

    made = replace_groups(
        drawn(scheduled), lambda _, count: drawn([next(fresh) for _ in range(count)]), has_signal, max_rounds=2
    )

    def errors(groups: Any, replaced: Any) -> list[str]:
        return [str(each) for each in replacement_errors(components, groups, replaced, scheduled, iteration=7)]

    assert errors(made.groups, made.replaced) == []
    if made.replaced:
        assert errors(drawn(scheduled), ()) != []  # groups without a signal stayed
        assert errors(made.groups, made.replaced[1:]) != []
    if len(made.replaced) < 4:
        kept = next(n for n, each in enumerate(made.groups) if each[0].rollout.prompt in scheduled)
        others = [*made.groups[:kept], drawn([next(fresh)])[0], *made.groups[kept + 1 :]]
        assert errors(others, (*made.replaced, made.groups[kept])) != []  # a group with a signal was dropped


def test_a_rollout_with_the_reference_of_another_prompt_is_named() -> None:
    rows = {each.prompt_id: each for each in prompts(3)}
    assert list(row_errors([group(each, 1.0) for each in rows.values()], rows)) == []
    moved = dataclasses.replace(rows["p1"], reference="2")
    (error,) = row_errors([group(moved, 1.0)], rows)
    assert str(error) == "the reference of prompt 'p1': expected '1', found '2'"


@pytest.mark.parametrize(("iteration", "staleness", "wanted"), [(1, 0, 0), (4, 0, 3), (2, 2, 0), (5, 2, 2)])
def test_rollouts_are_as_old_as_the_staleness_allows(iteration: int, staleness: int, wanted: int) -> None:
    (item,) = group(prompts(1)[0], 1.0)
    for version in range(5):
        aged = dataclasses.replace(item, rollout=dataclasses.replace(item.rollout, policy_version=version))
        assert bool(list(version_errors([[aged]], iteration, staleness=staleness))) == (version != wanted)


def test_a_measure_that_is_not_a_number_is_an_error() -> None:
    assert list(measure_error("the KL", math.nan, 0.1))
