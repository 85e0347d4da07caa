"""The learner: its single step against the plain-loop reference, and the laws of its gradient."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from rlcore.algorithms.table import ALGORITHMS
from rlcore.config import CriticConfig, KlConfig, OptimConfig, RolloutCorrectionConfig, SamplingConfig
from rlcore.models.policy import score_sequences
from rlcore.text.packing import TokenSequence
from rlcore.training import losses as losses_module
from rlcore.training.learner import Learner
from rlcore.training.minibatches import split_by_group, token_sequences
from rlcore.types import TrainingSample
from tests import strategies
from tests.learners import assert_same, gradients_of, make_learner, update_config, weights_of
from tests.reference import losses

EVERY_ROW = pytest.mark.parametrize("name", sorted(ALGORITHMS))


def reference_tokens(
    policy: LlamaForCausalLM, samples: Sequence[TrainingSample], *, temperature: float = 1.0, on_policy: bool
) -> list[list[losses.Token]]:
    """The samples as the reference's tokens, each sequence from a forward pass of its own."""
    sequences = []
    for sample in samples:
        sequence = TokenSequence(prompt_ids=sample.prompt_ids, completion_ids=sample.completion_ids)
        logprobs = losses.one_at_a_time(policy, sequence, temperature=temperature)
        old = logprobs.detach() if on_policy else sample.old_logprobs
        sequences.append(
            [
                losses.Token(logprobs[t], old[t], sample.ref_logprobs[t], float(sample.advantages[t]))
                for t in range(len(logprobs))
                if sample.loss_mask[t]
            ]
        )
    return sequences


def reference_gradient(policy: LlamaForCausalLM, loss: torch.Tensor) -> torch.Tensor:
    """The gradient in the order of an optimizer's groups: matrices, then vectors."""
    parameters = list(policy.parameters())
    ordered = [p for p in parameters if p.ndim >= 2] + [p for p in parameters if p.ndim < 2]
    return torch.cat([part.flatten() for part in torch.autograd.grad(loss, ordered)])


@pytest.mark.parametrize("minibatches", [1, 2])
@pytest.mark.parametrize("name", ["grpo", "gspo", "ppo"])
def test_an_update_returns_the_first_tokens_as_they_were_before_its_first_step(
    name: str, minibatches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses_module, "FIRST_TOKENS", 2)
    learner = make_learner(name, update=update_config(num_epochs=2, num_minibatches=minibatches))
    drawn = strategies.random_samples(4)
    samples = [dataclasses.replace(sample, replica=number) for number, sample in enumerate(drawn)]
    before = score_sequences(learner.policy, token_sequences(samples), tokens_per_microbatch=512)
    found, seen = learner.update(samples, seed=0).first_tokens, 0
    for number, (sample, logprobs) in enumerate(zip(samples, before, strict=True)):
        own = found[found[:, 0] == number]
        mask = sample.loss_mask & (torch.arange(len(logprobs)) < 2)
        if len(own):
            seen += 1
            assert own[:, 1].tolist() == pytest.approx(sample.sampler_logprobs[mask].tolist(), abs=1e-6)
            assert own[:, 2].tolist() == pytest.approx(logprobs[mask].tolist(), abs=1e-5)
            assert bool((own[:, 3] > 0.0).all())
    assert seen == sum(bool(sample.loss_mask[:2].any()) for sample in samples) if minibatches == 1 else seen > 0


def test_an_update_without_a_signal_has_first_tokens_too() -> None:
    samples = [dataclasses.replace(s, advantages=torch.zeros_like(s.advantages)) for s in strategies.random_samples(4)]
    assert len(make_learner().update(samples, seed=0).first_tokens) > 0


# Weights are float32 by design (1 / number of tokens), so the reference in float64 is met to 1e-6, not to 1e-9.


@pytest.mark.parametrize("seed", range(3))
def test_the_first_grpo_step_has_the_gradient_of_the_reference(seed: int) -> None:
    samples = strategies.random_samples(seed)
    learner = make_learner(
        "grpo", kl=KlConfig(coefficient=0.05), sampling=SamplingConfig(temperature=0.7, max_new_tokens=8)
    )
    tokens = reference_tokens(learner.policy, samples, temperature=0.7, on_policy=True)
    expected = reference_gradient(learner.policy, losses.grpo_loss(tokens, clip=0.2, beta=0.05))
    assert_same(gradients_of(learner, samples), expected, 1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_an_off_policy_ppo_step_has_the_gradient_of_the_reference(seed: int) -> None:
    # The first step of an update is on-policy by construction. The second uses the stored old log-probabilities, here
    # of a policy that the first has hardly moved.
    samples = strategies.random_samples(seed, num_prompts=1, group_size=5)
    learner = make_learner("ppo", learning_rate=1e-12, update=update_config(num_epochs=2))
    tokens = reference_tokens(learner.policy, samples, on_policy=False)
    expected = reference_gradient(learner.policy, losses.ppo_loss(tokens, clip=0.2))
    assert_same(gradients_of(learner, samples, step=1)[: len(expected)], expected, 1e-6)


def test_the_critic_step_has_the_gradient_of_the_reference() -> None:
    samples = strategies.random_samples(4)
    learner = make_learner("ppo", critic=CriticConfig(clip_range=0.1))
    critic = learner.critic
    assert critic is not None
    total, count = torch.zeros((), dtype=torch.float64), 0
    for sample in samples:
        ids = torch.tensor([sample.prompt_ids + sample.completion_ids])
        states = critic.backbone.base_model(ids).last_hidden_state[0]
        for t in range(len(sample.completion_ids)):
            if not sample.loss_mask[t]:
                continue
            value = critic.head(states[len(sample.prompt_ids) - 1 + t]).squeeze()
            clipped = value.clamp(sample.values[t] - 0.1, sample.values[t] + 0.1)
            total = total + 0.5 * torch.maximum((value - sample.returns[t]) ** 2, (clipped - sample.returns[t]) ** 2)
            count += 1
    used = [
        p
        for p in critic.parameters()
        if torch.autograd.grad(total, p, retain_graph=True, allow_unused=True)[0] is not None
    ]
    ordered = [p for p in used if p.ndim >= 2] + [p for p in used if p.ndim < 2]
    expected = torch.cat([part.flatten() for part in torch.autograd.grad(total / count, ordered)])
    assert_same(gradients_of(learner, samples)[-len(expected) :], expected, 1e-6)


def test_the_first_step_moves_every_weight_as_adam_does() -> None:
    # On Adam's first step m / (1 - beta1) = g and v / (1 - beta2) = g^2, so w changes by -lr * g / (|g| + eps).
    samples = strategies.random_samples(0)
    learner = make_learner("grpo", learning_rate=1e-2)
    before = copy.deepcopy(learner.policy)
    tokens = reference_tokens(before, samples, on_policy=True)
    gradients = torch.autograd.grad(losses.grpo_loss(tokens, clip=0.2, beta=0.0), list(before.parameters()))
    learner.update(samples, seed=0)
    for old, new, gradient in zip(before.parameters(), learner.policy.parameters(), gradients, strict=True):
        large = gradient.abs() > 1e-5  # next to eps = 1e-8 the float32 weights would show
        expected = old.detach() - 1e-2 * gradient / (gradient.abs() + 1e-8)
        torch.testing.assert_close(new.detach()[large], expected[large], rtol=0, atol=1e-8)


@pytest.mark.parametrize("norm", [0.1, 1e9])
def test_the_gradient_is_clipped_by_its_norm_before_the_step(norm: float) -> None:
    samples = strategies.random_samples(0)
    whole = gradients_of(make_learner(), samples)
    clipped_config = update_config(optim=OptimConfig(max_grad_norm=norm))
    learner = make_learner(update=clipped_config)
    assert_same(gradients_of(learner, samples), whole * min(1.0, norm / float(whole.norm())), 1e-5)


@EVERY_ROW
def test_the_gradient_does_not_depend_on_micro_batches_packing_padding_or_order(name: str) -> None:
    samples = strategies.random_samples(1)
    settings = {
        "kl": KlConfig(coefficient=0.05),
        "update": update_config(tokens_per_microbatch=1000, entropy_coefficient=0.01),
    }
    whole = gradients_of(make_learner(name, **settings), samples)
    for budget, order in ((1, samples), (24, samples), (60, samples[::-1]), (1000, samples[3:] + samples[:3])):
        settings["update"] = dataclasses.replace(settings["update"], tokens_per_microbatch=budget)
        assert_same(gradients_of(make_learner(name, **settings), order), whole, 1e-9)


@EVERY_ROW
def test_nan_in_masked_places_changes_no_weight(name: str) -> None:
    samples = strategies.random_samples(2, dtype=torch.float32)
    fields = ("sampler_logprobs", "old_logprobs", "ref_logprobs", "advantages", "values", "returns")
    assert any(not bool(sample.loss_mask.all()) for sample in samples)
    dirty = [
        dataclasses.replace(
            sample, **{field: getattr(sample, field).masked_fill(~sample.loss_mask, math.nan) for field in fields}
        )
        for sample in samples
    ]
    results = []
    for version in (samples, dirty):
        learner = make_learner(
            name,
            dtype=torch.float32,
            kl=KlConfig(coefficient=0.05),
            update=update_config(rollout_correction=RolloutCorrectionConfig()),
        )
        learner.update(version, seed=0)
        results.append(
            torch.cat([weights_of(model) for model in (learner.policy, learner.critic) if model is not None])
        )
    assert torch.equal(*results)


def test_a_dropped_completion_is_in_neither_numerator_nor_denominator() -> None:
    # Masked as a whole, it leaves the same gradient as a step without it.
    samples = strategies.random_samples(3)
    dropped = dataclasses.replace(samples[4], loss_mask=torch.zeros_like(samples[4].loss_mask))
    for name in ("grpo", "dapo", "dr_grpo"):
        with_it = gradients_of(make_learner(name), [*samples[:4], dropped, *samples[5:]])
        without = gradients_of(make_learner(name), [*samples[:4], *samples[5:]])
        assert_same(with_it, without, 1e-9)


def with_silent_group(seed: int) -> list[TrainingSample]:
    """Samples whose second group has no signal."""
    samples = strategies.random_samples(seed)
    silent = [dataclasses.replace(sample, advantages=torch.zeros_like(sample.advantages)) for sample in samples[3:6]]
    return [*samples[:3], *silent, *samples[6:]]


def prompts_forwarded(learner: Learner, samples: Sequence[TrainingSample]) -> set[int]:
    """The first tokens of the rows that go through the policy's backbone during an update."""
    seen: set[int] = set()

    def watch(_module: Any, _args: Any, kwargs: Any) -> None:
        seen.update(kwargs["input_ids"][:, 0].tolist())

    handle = learner.policy.base_model.register_forward_pre_hook(watch, with_kwargs=True)
    learner.update(samples, seed=0)
    handle.remove()
    return seen


def test_groups_without_signal_are_left_out_and_the_gradient_is_that_of_all() -> None:
    samples = with_silent_group(5)
    learner = make_learner()
    tokens = reference_tokens(learner.policy, samples, on_policy=True)
    expected = reference_gradient(learner.policy, losses.grpo_loss(tokens, clip=0.2, beta=0.0))
    assert_same(gradients_of(learner, samples), expected, 1e-6)
    assert prompts_forwarded(make_learner(), samples) == {1, 3}


@pytest.mark.parametrize(
    "settings",
    [{"kl": KlConfig(coefficient=0.1)}, {"update": update_config(entropy_coefficient=0.1)}],
    ids=["kl", "entropy"],
)
def test_groups_without_signal_stay_where_another_term_needs_them(settings: dict[str, Any]) -> None:
    assert prompts_forwarded(make_learner(**settings), with_silent_group(5)) == {1, 2, 3}


def test_kl_in_the_reward_is_no_reason_to_keep_a_group() -> None:
    learner = make_learner(kl=KlConfig(coefficient=0.1, apply_to="reward"))
    assert prompts_forwarded(learner, with_silent_group(5)) == {1, 3}


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_without_any_signal_the_policy_does_not_move_even_with_momentum(name: str) -> None:
    samples = strategies.random_samples(0)
    learner = make_learner(name)
    assert learner.update(samples, seed=0).moved
    silent = [dataclasses.replace(sample, advantages=torch.zeros_like(sample.advantages)) for sample in samples]
    before = weights_of(learner.policy)
    stats = learner.update(silent, seed=1)
    assert not stats.moved
    assert torch.equal(weights_of(learner.policy), before)
    assert stats.policy_version == 2


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_moved_says_what_happened_to_the_weights(name: str) -> None:
    learner = make_learner(name, dtype=torch.float32)
    for seed in range(3):
        before = weights_of(learner.policy)
        stats = learner.update(strategies.random_samples(seed, dtype=torch.float32), seed=seed)
        assert stats.moved == (not torch.equal(weights_of(learner.policy), before))


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_minibatches_keep_groups_together_and_lose_nothing(count: int) -> None:
    samples = strategies.random_samples(0, num_prompts=5, group_size=3)
    dealt = split_by_group(samples, count, seed=0, epoch=0)
    assert len(dealt) == min(count, 5)
    assert sorted(id(s) for batch in dealt for s in batch) == sorted(map(id, samples))
    homes = [{s.prompt_ids for s in batch} for batch in dealt]
    assert sum(map(len, homes)) == 5
    assert max(map(len, homes)) - min(map(len, homes)) <= 1


def test_every_epoch_deals_in_an_order_of_its_own() -> None:
    samples = strategies.random_samples(0, num_prompts=8, group_size=1)
    orders = {
        tuple(s.prompt_ids for batch in split_by_group(samples, 4, seed=0, epoch=epoch) for s in batch)
        for epoch in range(4)
    }
    assert len(orders) == 4


def test_the_kl_coefficient_scales_the_kl_term_of_the_loss() -> None:
    # With all advantages zero the gradient is that of the KL alone, linear in beta.
    samples = [
        dataclasses.replace(sample, advantages=torch.zeros_like(sample.advantages))
        for sample in strategies.random_samples(0)
    ]
    one, two = (gradients_of(make_learner(kl=KlConfig(coefficient=beta)), samples) for beta in (0.1, 0.2))
    assert_same(two, 2.0 * one, 1e-9)
