"""The learner's step against plain loops, and the laws of its gradient."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from rlcore.algorithms.advantages import STD_EPSILON
from rlcore.algorithms.table import ALGORITHMS
from rlcore.config import KlConfig, OptimConfig, RolloutCorrectionConfig, SamplingConfig
from rlcore.models.heads import ScalarHeadModel
from rlcore.models.policy import score_sequences
from rlcore.text.packing import TokenSequence
from rlcore.training import losses as losses_module
from rlcore.training.learner import Learner
from rlcore.training.minibatches import token_sequences
from rlcore.types import Rollout, ScoredRollout, TrainingSample
from tests import strategies
from tests.learners import (
    assert_same,
    experience_of,
    gradient_of_loops,
    gradients_of,
    make_learner,
    silenced,
    update_config,
    weights_of,
)
from tests.reference import iteration, losses
from tests.reference.losses import one_at_a_time

EVERY_ROW = pytest.mark.parametrize("name", sorted(ALGORITHMS))


def reference_tokens(
    policy: LlamaForCausalLM, samples: Sequence[TrainingSample], *, temperature: float = 1.0, on_policy: bool
) -> list[list[losses.Token]]:
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


@pytest.mark.parametrize(("name", "minibatches"), [("grpo", 1), ("gspo", 2), ("ppo", 2)])
def test_update_returns_first_tokens_before_first_step(
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


def test_update_without_signal_has_first_tokens() -> None:
    assert len(make_learner().update(silenced(strategies.random_samples(4)), seed=0).first_tokens) > 0


def test_grpo_gradient_equals_plain_loops() -> None:
    samples = strategies.random_samples(0)
    learner = make_learner(
        "grpo", kl=KlConfig(coefficient=0.05), sampling=SamplingConfig(temperature=0.7, max_new_tokens=8)
    )
    tokens = reference_tokens(learner.policy, samples, temperature=0.7, on_policy=True)
    expected = gradient_of_loops((losses.grpo_loss(tokens, clip=0.2, beta=0.05), learner.policy))
    assert_same(gradients_of(learner, samples), expected, 1e-6)


def test_off_policy_ppo_gradient_equals_plain_loops() -> None:
    # The first step of an update is on-policy by construction. The second uses the stored old log-probabilities, here
    # of a policy that the first has hardly moved.
    samples = strategies.random_samples(0, num_prompts=1, group_size=5)
    learner = make_learner("ppo", learning_rate=1e-12, update=update_config(num_epochs=2))
    tokens = reference_tokens(learner.policy, samples, on_policy=False)
    expected = gradient_of_loops((losses.ppo_loss(tokens, clip=0.2), learner.policy))
    assert_same(gradients_of(learner, samples, step=1)[: len(expected)], expected, 1e-6)


def test_first_step_equals_adam() -> None:
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
def test_gradient_is_clipped_by_norm(norm: float) -> None:
    samples = strategies.random_samples(0)
    whole = gradients_of(make_learner(), samples)
    clipped_config = update_config(optim=OptimConfig(max_grad_norm=norm))
    learner = make_learner(update=clipped_config)
    assert_same(gradients_of(learner, samples), whole * min(1.0, norm / float(whole.norm())), 1e-5)


@EVERY_ROW
def test_gradient_does_not_depend_on_micro_batches_or_order(name: str) -> None:
    samples = strategies.random_samples(1)
    settings = {
        "kl": KlConfig(coefficient=0.05),
        "update": update_config(tokens_per_microbatch=1000, entropy_coefficient=0.01),
    }
    whole = gradients_of(make_learner(name, **settings), samples)
    for budget, order in ((1, samples), (24, samples[::-1]), (1000, samples[3:] + samples[:3])):
        settings["update"] = dataclasses.replace(settings["update"], tokens_per_microbatch=budget)
        assert_same(gradients_of(make_learner(name, **settings), order), whole, 1e-9)


@EVERY_ROW
def test_masked_nan_changes_no_weight(name: str) -> None:
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


def test_masked_completion_equals_missing_completion() -> None:
    # Masked as a whole, it leaves the same gradient as a step without it.
    samples = strategies.random_samples(3)
    dropped = dataclasses.replace(samples[4], loss_mask=torch.zeros_like(samples[4].loss_mask))
    for name in ("grpo", "dapo", "dr_grpo"):
        with_it = gradients_of(make_learner(name), [*samples[:4], dropped, *samples[5:]])
        without = gradients_of(make_learner(name), [*samples[:4], *samples[5:]])
        assert_same(with_it, without, 1e-9)


def with_silent_group(seed: int) -> list[TrainingSample]:
    samples = strategies.random_samples(seed)
    return silenced(samples, samples[3].prompt_ids)


def prompts_forwarded(learner: Learner, samples: Sequence[TrainingSample]) -> set[int]:
    """The first tokens of the rows that go through the policy's backbone during an update."""
    seen: set[int] = set()

    def watch(_module: Any, _args: Any, kwargs: Any) -> None:
        seen.update(kwargs["input_ids"][:, 0].tolist())

    handle = learner.policy.base_model.register_forward_pre_hook(watch, with_kwargs=True)
    learner.update(samples, seed=0)
    handle.remove()
    return seen


def test_silent_groups_are_skipped() -> None:
    samples = with_silent_group(5)
    learner = make_learner()
    tokens = reference_tokens(learner.policy, samples, on_policy=True)
    expected = gradient_of_loops((losses.grpo_loss(tokens, clip=0.2, beta=0.0), learner.policy))
    assert_same(gradients_of(learner, samples), expected, 1e-6)
    assert prompts_forwarded(make_learner(), samples) == {1, 3}


@pytest.mark.parametrize(
    "settings",
    [{"kl": KlConfig(coefficient=0.1)}, {"update": update_config(entropy_coefficient=0.1)}],
    ids=["kl", "entropy"],
)
def test_silent_groups_stay_for_other_terms(settings: dict[str, Any]) -> None:
    assert prompts_forwarded(make_learner(**settings), with_silent_group(5)) == {1, 2, 3}


def test_silent_groups_are_skipped_with_kl_in_reward() -> None:
    learner = make_learner(kl=KlConfig(coefficient=0.1, apply_to="reward"))
    assert prompts_forwarded(learner, with_silent_group(5)) == {1, 3}


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_policy_without_signal_does_not_move(name: str) -> None:
    samples = strategies.random_samples(0)
    learner = make_learner(name)
    assert learner.update(samples, seed=0).moved
    before = weights_of(learner.policy)
    stats = learner.update(silenced(samples), seed=1)
    assert not stats.moved
    assert torch.equal(weights_of(learner.policy), before)
    assert stats.policy_version == 2


BETA, CAP = 0.3, 1.3
BOUND = 1e-5  # old log-probabilities, values and advantages travel as float32
REFERENCE = strategies.tiny_llama(seed=9, dtype=torch.float64)
KLS = {"none": KlConfig(), "reward": KlConfig(coefficient=BETA, apply_to="reward"), "loss": KlConfig(coefficient=BETA)}
MISMATCHES = {"off": RolloutCorrectionConfig(mode="off"), "truncate": RolloutCorrectionConfig(high=CAP)}
SCORES = ((0.0, 1.0, None, 0.25), (1.0, 1.0, 1.0, 1.0))  # None: the grader failed; the second group is of one mind


def scored_groups(policy: Any) -> list[list[ScoredRollout]]:
    groups = []
    for group, scores in zip(strategies.random_groups(policy, 3, num_prompts=2, group_size=4), SCORES, strict=True):
        items = []
        for number, (item, value) in enumerate(zip(group, scores, strict=True)):
            count = len(item.rollout.completion_ids)
            rollout = dataclasses.replace(
                item.rollout,
                finish_reason="length" if number == 1 else "stop",
                loss_mask=tuple(place != 1 or count < 3 for place in range(count)),
                sampler_logprobs=tuple(p - 0.4 * (place % 2) for place, p in enumerate(item.rollout.sampler_logprobs)),
            )
            items.append(ScoredRollout(rollout=rollout, score=dataclasses.replace(item.score, value=value)))
        groups.append(items)
    return groups


def completion(
    learner: Learner, rollout: Rollout, reward: float, group: int, *, corrected: bool, with_reference: bool
) -> iteration.Completion:
    sequence = TokenSequence(prompt_ids=rollout.prompt.token_ids, completion_ids=rollout.completion_ids)
    logprobs = one_at_a_time(learner.policy, sequence)
    refs = one_at_a_time(REFERENCE, sequence).tolist() if with_reference else logprobs.tolist()
    values = torch.zeros(len(logprobs), dtype=torch.float64)
    if learner.critic is not None:
        ids = torch.tensor([sequence.prompt_ids + sequence.completion_ids])
        states = learner.critic.backbone.base_model(ids).last_hidden_state[0]
        values = learner.critic.head(states)[len(sequence.prompt_ids) - 1 : -1, 0]
    tokens = [
        iteration.TokenOf(
            logprob=logprob,
            value=value,
            old_logprob=float(logprob.detach()),
            sampler_logprob=sampled if corrected else float(logprob.detach()),
            ref_logprob=ref,
            old_value=float(value.detach()),
            own=own,
        )
        for logprob, value, sampled, ref, own in zip(
            logprobs, values, rollout.sampler_logprobs, refs, rollout.loss_mask, strict=True
        )
    ]
    return iteration.Completion(tokens, reward, group)


def kept_completions(learner: Learner, truncated: str, kl: KlConfig, *, corrected: bool) -> list[iteration.Completion]:
    """Return the completions that are trained on with their rewards, as documented."""
    made = []
    for number, group in enumerate(scored_groups(learner.policy)):
        for item in group:
            cut = item.rollout.finish_reason == "length"
            if item.score.value is None or (cut and truncated == "mask"):
                continue
            reward = 0.0 if cut and truncated == "zero" else item.score.value
            settings = {"corrected": corrected, "with_reference": kl.coefficient > 0.0}
            made.append(completion(learner, item.rollout, reward, number, **settings))
    return made


def with_kl_paid(batch: Sequence[iteration.Completion]) -> list[iteration.Completion]:
    """Each reward less beta times the summed log-ratio of the policy's own tokens."""
    gaps = [sum(t.old_logprob - t.ref_logprob for t in one.tokens if t.own) for one in batch]
    return [one._replace(reward=one.reward - BETA * gap) for one, gap in zip(batch, gaps, strict=True)]


def gradient_of_ours(learner: Learner, truncated: str) -> torch.Tensor:
    kl = learner.config.kl
    models = (learner.policy, REFERENCE if kl.coefficient > 0.0 else None, learner.critic)
    settings: dict[str, Any] = {"kl": kl, "kl_coefficient": kl.coefficient, "truncated": truncated}
    settings["need_old_logprobs"] = learner.config.update.needs_old_logprobs
    experience = experience_of(scored_groups(learner.policy), learner.algorithm, *models, **settings)
    return gradients_of(learner, experience.samples)


@pytest.mark.parametrize(
    ("placement", "truncated", "mismatch"),
    [
        ("none", "score", "truncate"),
        ("none", "zero", "off"),
        ("none", "mask", "truncate"),
        ("reward", "score", "off"),
        ("reward", "zero", "truncate"),
        ("reward", "mask", "off"),
        ("loss", "score", "truncate"),
        ("loss", "zero", "off"),
        ("loss", "mask", "truncate"),
    ],
)
def test_grpo_settings_together_equal_plain_loops(placement: str, truncated: str, mismatch: str) -> None:
    kl = KLS[placement]
    update: Any = update_config(
        rollout_correction=MISMATCHES[mismatch], truncated_completions=truncated, tokens_per_microbatch=40
    )
    learner = make_learner("grpo", kl=kl, update=update)
    batch = kept_completions(learner, truncated, kl, corrected=mismatch == "truncate")
    in_loss = BETA if placement == "loss" else 0.0
    paid = with_kl_paid(batch) if placement == "reward" else batch
    loss = iteration.grpo(paid, beta=in_loss, clip=0.2, cap=CAP, epsilon=STD_EPSILON)
    expected = gradient_of_loops((loss, learner.policy))  # before the update moves the weights
    assert_same(gradient_of_ours(learner, truncated), expected, BOUND)


@pytest.mark.parametrize(
    ("placement", "truncated"), [("none", "score"), ("none", "mask"), ("reward", "score"), ("reward", "zero")]
)
def test_ppo_settings_together_equal_plain_loops(placement: str, truncated: str) -> None:
    kl = KLS[placement]
    update: Any = update_config(truncated_completions=truncated, tokens_per_microbatch=40)
    learner = make_learner("ppo", kl=kl, update=update)
    assert isinstance(learner.critic, ScalarHeadModel)
    batch = kept_completions(learner, truncated, kl, corrected=False)
    losses = iteration.ppo(batch, beta=kl.coefficient, gamma=1.0, lam=0.95, clip=0.2, value_clip=0.2)
    expected = gradient_of_loops((losses[0], learner.policy), (losses[1], learner.critic))
    assert_same(gradient_of_ours(learner, truncated), expected, BOUND)
