"""Architectures of the critic: a head on the policy's backbone, or an adapter next to the policy's."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from rlcore.algorithms.table import ALGORITHMS
from rlcore.config import CriticConfig, KlConfig, LoraConfig, OptimConfig
from rlcore.errors import ConfigError, NonFiniteError
from rlcore.models.heads import ScalarHeadModel
from rlcore.models.lora import AdaptedModel, add_lora
from rlcore.training.learner import Learner
from rlcore.types import TrainingSample
from tests import strategies
from tests.learners import assert_same, experience_of, shared_learner, silenced, update_config, weights_of

ADAPTER = LoraConfig(rank=3)


def adapted_learner(**settings: Any) -> Learner:
    base = strategies.tiny_llama()
    policy = add_lora(base, ADAPTER, "policy", seed=0)
    critic = ScalarHeadModel.on_backbone(add_lora(base, ADAPTER, "critic", seed=0))
    update = update_config(lora=ADAPTER)
    critic_config = CriticConfig(architecture="lora", learning_rate=1e-2)
    config = strategies.rl_config("ppo", **({"update": update, "critic": critic_config} | settings))
    return Learner(policy, critic, algorithm=ALGORITHMS["ppo"], config=config)


def step_gradients(learner: Learner, samples: list[TrainingSample]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of the first optimizer step: of the policy's parameters, and of the head."""
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def flat(module: torch.nn.Module) -> torch.Tensor:
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in module.parameters()]
        return torch.cat([part.flatten() for part in parts]).clone()

    assert learner.critic is not None
    head = learner.critic.head
    learner.optimizer.register_step_pre_hook(lambda *_: seen.append((flat(learner.policy), flat(head))))
    learner.update(samples, seed=0)
    return seen[0]


def separate_gradients(samples: list[TrainingSample]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same losses with a backbone for each: gradient of the policy, of the critic's backbone, of its head."""
    shared = shared_learner()
    assert shared.critic is not None
    critic = ScalarHeadModel(strategies.tiny_llama(dtype=torch.float64), shared.critic.head)
    config = dataclasses.replace(shared.config, critic=CriticConfig())
    learner = Learner(shared.policy, critic, algorithm=ALGORITHMS["ppo"], config=config)
    seen: list[torch.Tensor] = []

    def remember(module: torch.nn.Module) -> Any:
        return lambda *_: seen.append(torch.cat([p.grad.flatten() for p in module.parameters()]).clone())

    learner.optimizer.register_step_pre_hook(remember(learner.policy))
    learner.critic_optimizer.register_step_pre_hook(remember(critic.backbone))
    learner.critic_optimizer.register_step_pre_hook(remember(critic.head))
    learner.update(samples, seed=0)
    backbone, head, policy = seen  # the critic steps first
    return policy, backbone, head


@pytest.mark.parametrize("settings", [{}, {"coefficient": 2.0}, {"detach": True}])
def test_the_gradient_of_a_shared_backbone_is_that_of_both_losses(settings: dict[str, Any]) -> None:
    samples, config = strategies.random_samples(1), CriticConfig(architecture="shared", **settings)
    policy, backbone, head = separate_gradients(samples)
    ours, ours_of_head = step_gradients(shared_learner(critic=config), samples)
    coefficient = settings.get("coefficient", 0.5)
    assert_same(ours, policy if config.detach else policy + coefficient * backbone, 1e-9)
    assert_same(ours_of_head, coefficient * head, 1e-9)


def count_passes(model: torch.nn.Module) -> list[int]:
    """A list that grows by one with each forward pass of a backbone."""
    passes: list[int] = []
    model.register_forward_pre_hook(lambda *_: passes.append(1))
    return passes


def test_experience_too_takes_one_pass_and_has_the_values_of_two() -> None:
    learner = shared_learner(dtype=torch.float32)
    assert learner.critic is not None
    groups = strategies.random_groups(learner.policy, 0)
    own = ScalarHeadModel(strategies.tiny_llama(), learner.critic.head)
    built = []
    for critic in (learner.critic, own):
        passes = count_passes(learner.policy.base_model)
        models = (learner.policy, None, critic)
        built.append(experience_of(groups, ALGORITHMS["ppo"], *models, temperature=0.8, tokens_per_microbatch=1000))
        assert len(passes) == 1
    for shared, separate in zip(*(each.samples for each in built), strict=True):
        assert torch.equal(shared.old_logprobs, separate.old_logprobs)
        assert torch.equal(shared.values, separate.values)
        assert bool(shared.values.any())


def test_while_a_shared_head_warms_up_the_backbone_stays_as_it_is() -> None:
    critic = CriticConfig(architecture="shared", warmup_iterations=2, learning_rate=1e-3)
    learner = shared_learner(critic=critic)
    assert learner.critic is not None
    policy, head = weights_of(learner.policy), weights_of(learner.critic.head)
    for seed in range(2):
        stats = learner.update(strategies.random_samples(seed), seed=seed)
        assert not stats.moved
        assert torch.equal(weights_of(learner.policy), policy)
        assert (stats.metrics["loss/policy"], stats.metrics["gradient_norm"]) == (0.0, 0.0)
    assert not torch.equal(weights_of(learner.critic.head), head)
    assert learner.update(strategies.random_samples(2), seed=2).moved


def test_without_any_signal_a_detached_head_learns_and_no_momentum_moves_the_policy() -> None:
    learner = shared_learner(critic=CriticConfig(architecture="shared", detach=True))
    assert learner.critic is not None
    samples = strategies.random_samples(0)
    assert learner.update(samples, seed=0).moved
    policy, head = weights_of(learner.policy), weights_of(learner.critic.head)
    assert not learner.update(silenced(samples), seed=1).moved
    assert torch.equal(weights_of(learner.policy), policy)
    assert not torch.equal(weights_of(learner.critic.head), head)


def test_the_shared_head_has_a_rate_of_its_own_in_the_schedule_of_the_backbone() -> None:
    optim = OptimConfig(warmup_steps=4, schedule="linear")
    critic = CriticConfig(architecture="shared", learning_rate=1e-3)
    learner = shared_learner(critic=critic, update=update_config(optim=optim), learning_rate=1e-2)
    metrics = learner.update(strategies.random_samples(0), seed=0).metrics
    assert (metrics["learning_rate"], metrics["critic/learning_rate"]) == pytest.approx((0.5e-2, 0.5e-3))
    parameters = [p for group in learner.optimizer.param_groups for p in group["params"]]
    assert len(parameters) == len(list(learner.policy.parameters())) + 1


def test_a_gradient_that_overflows_moves_neither_backbone_nor_head() -> None:
    samples = [
        dataclasses.replace(sample, returns=sample.returns.sign() * 1e30)
        for sample in strategies.random_samples(0, dtype=torch.float32)
    ]
    learner = shared_learner(dtype=torch.float32, update=update_config(max_skipped_steps=0))
    assert learner.critic is not None
    before = weights_of(learner.critic)
    with pytest.raises(NonFiniteError):
        learner.update(samples, seed=0)
    assert torch.equal(weights_of(learner.critic), before)


def test_adapters_learn_and_their_base_does_not_move() -> None:
    learner = adapted_learner()
    assert learner.critic is not None
    base = learner.policy.base
    adapters = {id(p) for model in (learner.policy, learner.critic) for p in model.parameters()}
    frozen = [p for p in base.parameters() if id(p) not in adapters]
    before = [p.detach().clone() for p in frozen]
    policy, critic = weights_of(learner.policy), weights_of(learner.critic)
    for seed in range(3):  # B is 0 at first, and so is the critic's head: the A of the critic waits for both
        assert learner.update(strategies.random_samples(seed, dtype=torch.float32), seed=seed).moved
    assert all(torch.equal(new, old) for new, old in zip(frozen, before, strict=True))
    assert all(p.grad is None for p in frozen)
    assert bool((weights_of(learner.policy) != policy).all())
    assert float((weights_of(learner.critic) != critic).float().mean()) > 0.9
    trained = [p for group in learner.optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in trained} == {id(p) for p in learner.policy.parameters()}


def test_the_values_of_an_adapted_critic_do_not_depend_on_the_policys_adapter() -> None:
    learner = adapted_learner()
    samples = strategies.random_samples(0, dtype=torch.float32)
    for seed in range(2):
        learner.update(samples, seed=seed)
    assert learner.critic is not None
    groups = strategies.random_groups(learner.policy, 0)
    models = (learner.policy, AdaptedModel(learner.policy.base, ""), learner.critic)
    settings = {"kl": KlConfig(coefficient=0.1, apply_to="reward"), "kl_coefficient": 0.1}
    before = experience_of(groups, ALGORITHMS["ppo"], *models, **settings).samples
    with torch.no_grad():
        for parameter in learner.policy.parameters():
            parameter.zero_()
    after = experience_of(groups, ALGORITHMS["ppo"], *models, **settings).samples
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old.values, new.values)
        assert bool(old.values.any())
        assert torch.equal(old.ref_logprobs, new.ref_logprobs)
        assert torch.equal(new.old_logprobs, new.ref_logprobs)
        assert not torch.equal(old.old_logprobs, old.ref_logprobs)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"architecture": "shared", "init_from": "reward_model"}, "init_from must be"),
        ({"architecture": "shared", "optim": OptimConfig()}, "update.optim"),
        ({"architecture": "lora"}, "update.lora.rank > 0"),
    ],
)
def test_what_makes_no_sense_is_refused_in_the_configuration(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        strategies.rl_config("ppo", critic=CriticConfig(**settings))
