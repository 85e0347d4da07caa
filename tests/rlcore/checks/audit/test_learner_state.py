"""Optimizer steps, gradients and what a learner keeps between iterations, recomputed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
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


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_correct_steps_have_no_finding(name: str) -> None:
    assert errors_of(make_learner(name, dtype=torch.float32, update=UPDATE, num_iterations=6), updates=6) == []


def test_a_head_on_the_policys_backbone_and_a_critic_that_warms_up_are_left_alone() -> None:
    critic = CriticConfig(architecture="shared", warmup_iterations=12)
    learner = shared_learner(dtype=torch.float32, update=UPDATE, critic=critic, num_iterations=14)
    assert errors_of(learner, updates=14) == []


def test_an_optimizer_that_climbs_is_found_in_its_first_step() -> None:
    learner = make_learner("grpo", dtype=torch.float32, update=UPDATE)
    for group in learner.optimizer.param_groups:
        group["maximize"] = True
    assert "AdamW at this point of the schedule" in errors_of(learner)[0]


def test_moments_that_were_forgotten_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(optimizer: torch.optim.Optimizer) -> None:
        optimizer.state.clear()
        optim.take_step(optimizer)

    monkeypatch.setattr(learner_module, "take_step", forgetful)
    found = errors_of(make_learner("grpo", dtype=torch.float32, update=UPDATE), updates=2)
    assert "are of 0 steps, expected 1" in found[0]


def test_a_rate_that_is_not_the_schedules_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = make_learner("grpo", dtype=torch.float32, update=UPDATE)
    monkeypatch.setattr(learner_module, "set_schedule_step", lambda scheduler, step: None)
    for group in learner.optimizer.param_groups:
        group["lr"] = 0.1
    assert "AdamW at this point of the schedule" in errors_of(learner)[0]


def test_a_gradient_that_is_not_clipped_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    clip = optim.clip_gradient

    def loose(parameters: Any, *, max_grad_norm: float, scale: float = 1.0) -> float:
        return clip(parameters, max_grad_norm=1e9, scale=scale)

    monkeypatch.setattr(learner_module, "clip_gradient", loose)
    tight = UpdateConfig(optim=OptimConfig(max_grad_norm=1e-3), rollout_correction=NO_CORRECTION)
    assert "the clipping limit is 0.001" in errors_of(make_learner("grpo", dtype=torch.float32, update=tight))[0]


def test_weights_that_no_optimizer_holds_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def last_alone(groups: Any, config: OptimConfig) -> torch.optim.Optimizer:
        ((module, rate),) = groups
        for path, parameter in module.named_parameters():
            parameter.requires_grad_("layers.1" in path)
        return make_optimizer([(module, rate)], config)

    monkeypatch.setattr(learner_module, "make_optimizer", last_alone)
    (found,) = errors_of(make_learner("grpo", dtype=torch.float32, update=UPDATE))
    assert "11 of 20 trainable tensors are in no optimizer: model.embed_tokens.weight, " in found


def test_weights_that_get_no_gradient_are_named_after_ten_steps() -> None:
    learner = make_learner("grpo", dtype=torch.float32, update=UPDATE)
    idle = dict(learner.policy.named_parameters())["model.layers.1.mlp.up_proj.weight"]
    idle.register_hook(torch.zeros_like)
    assert errors_of(learner, updates=2) == []
    learner = make_learner("grpo", dtype=torch.float32, update=UPDATE)
    idle = dict(learner.policy.named_parameters())["model.layers.1.mlp.up_proj.weight"]
    idle.register_hook(torch.zeros_like)
    (found,) = errors_of(learner, updates=4)
    assert "1 of 20 trainable tensors got no gradient in 10 steps: model.layers.1.mlp.up_proj.weight" in found


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_the_rate_by_formula_is_that_of_the_library(schedule: Any) -> None:
    config = OptimConfig(warmup_steps=3, schedule=schedule)
    optimizer = make_optimizer([(torch.nn.Linear(2, 2), 0.5)], config)
    scheduler = make_scheduler(optimizer, config, num_steps=9)
    for step in range(12):
        optim.set_schedule_step(scheduler, step)
        assert learning_rate_at(config, 0.5, step, num_steps=9) == pytest.approx(optimizer.param_groups[0]["lr"])


def around_steps(monkeypatch: pytest.MonkeyPatch, change: Callable[[Learner, dict[str, torch.Tensor]], None]) -> None:
    """Change weights after each step, by what they were before it."""
    steps = Learner._take_steps

    def take(self: Learner, totals: Any) -> None:
        before = {name: parameter.detach().clone() for name, parameter in self.policy.named_parameters()}
        steps(self, totals)
        with torch.no_grad():
            change(self, before)

    monkeypatch.setattr(Learner, "_take_steps", take)


@pytest.mark.parametrize("word", ["embed_tokens", "model.norm", "layers.0.mlp.down_proj"])
def test_a_tensor_that_stands_still_is_named_whichever_it_is(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def back(learner: Learner, before: dict[str, torch.Tensor]) -> None:
        for name, parameter in learner.policy.named_parameters():
            if word in name:
                parameter.copy_(before[name])

    around_steps(monkeypatch, back)
    learner = make_learner("grpo", dtype=torch.float32, update=UPDATE)
    found = errors_of(learner, updates=3)
    assert any(word in sentence and "changed outside of optimizer steps" in sentence for sentence in found)


def test_a_rate_that_is_wrong_after_the_first_step_alone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    seek = optim.set_schedule_step
    monkeypatch.setattr(learner_module, "set_schedule_step", lambda scheduler, step: seek(scheduler, step - step % 4))
    assert (
        "AdamW at this point of the schedule" in errors_of(make_learner("grpo", dtype=torch.float32, update=UPDATE))[0]
    )


def test_gradients_that_are_zero_everywhere_count_for_no_step() -> None:
    learner = make_learner("ppo", dtype=torch.float32, update=UPDATE)
    assert learner.critic is not None
    for parameter in learner.critic.parameters():
        parameter.register_hook(torch.zeros_like)
    assert errors_of(learner, updates=4) == []


def test_a_step_that_is_left_out_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    count = [0]

    def take(optimizer: torch.optim.Optimizer) -> None:
        count[0] += 1
        if count[0] % 2:
            optim.take_step(optimizer)

    monkeypatch.setattr(learner_module, "take_step", take)
    found = errors_of(make_learner("grpo", dtype=torch.float32, update=UPDATE))
    assert "the policy's optimizer took 2 steps since the last update, expected 4" in found


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


TIGHT = UpdateConfig(optim=OptimConfig(max_grad_norm=1e-3), rollout_correction=NO_CORRECTION)

LOOSE = UpdateConfig(optim=OptimConfig(max_grad_norm=1e3), rollout_correction=NO_CORRECTION)


@pytest.mark.parametrize("update", [TIGHT, LOOSE])
@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_a_gradient_that_is_clipped_or_whole_is_left_alone(name: str, update: UpdateConfig) -> None:
    assert errors_of(make_learner(name, dtype=torch.float32, update=update), updates=3) == []


def changed(monkeypatch: pytest.MonkeyPatch, change: Callable[[list[Any]], None], update: UpdateConfig) -> list[str]:
    clip = optim.clip_gradient

    def clipping(parameters: Any, **settings: Any) -> float:
        listed = list(parameters)
        change([parameter for parameter in listed if parameter.grad is not None])
        return clip(listed, **settings)

    monkeypatch.setattr(learner_module, "clip_gradient", clipping)
    return errors_of(make_learner("grpo", dtype=torch.float32, update=update))


@pytest.mark.parametrize(
    ("factor", "update", "says"),
    [
        (-1.0, LOOSE, "a step has -1 times the gradient of its backward passes"),
        (0.5, LOOSE, "a step has 0.5 times the gradient of its backward passes"),
        (3.0, LOOSE, "a step has 3 times the gradient of its backward passes"),
        (-1.0, TIGHT, "times the gradient of its backward passes"),
    ],
)
def test_a_gradient_that_was_turned_halved_or_raised_is_found(
    factor: float, update: UpdateConfig, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = changed(monkeypatch, lambda them: [each.grad.mul_(factor) for each in them][:0] and None, update)
    assert says in found[0]


@pytest.mark.parametrize("place", [0, 7, -1])
def test_a_single_tensors_gradient_that_was_changed_is_named(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = changed(monkeypatch, lambda them: them[place].grad.mul_(0.5), LOOSE)
    assert "changed between backward pass and step, others did not" in found[0]
