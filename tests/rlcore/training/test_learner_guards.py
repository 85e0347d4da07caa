"""The learner's guards and its state: what stops an update, what an update leaves, and what it reports."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import pytest
import torch

from rlcore.config import CriticConfig, KlConfig, OptimConfig, RolloutCorrectionConfig
from rlcore.errors import NonFiniteError
from rlcore.models.policy import score_sequences
from rlcore.text.packing import TokenSequence
from rlcore.training.learner import Learner
from rlcore.training.loss_scale import LossScale
from rlcore.types import TrainingSample
from tests import strategies
from tests.learners import make_learner, on_policy_samples, update_config, weights_of

NO_SKIPS = update_config(max_skipped_steps=0)
FIELDS = ["sampler_logprobs", "old_logprobs", "ref_logprobs", "advantages", "values", "returns"]


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_sample_is_named_and_nothing_changes(field: str, bad: float) -> None:
    samples = strategies.random_samples(0)
    broken = getattr(samples[7], field).clone()
    broken[-1] = bad
    samples[7] = dataclasses.replace(samples[7], **{field: broken})
    learner = make_learner("ppo", update=update_config(num_minibatches=3))
    assert learner.critic is not None
    before = weights_of(learner.policy), weights_of(learner.critic)
    with pytest.raises(NonFiniteError, match=f"{field} of a completion") as caught:
        learner.update(samples, seed=0)
    assert "sample 7" in caught.value.where
    assert torch.equal(weights_of(learner.policy), before[0])
    assert torch.equal(weights_of(learner.critic), before[1])
    assert learner.policy_version == 0


def test_a_non_finite_loss_stops_before_the_step() -> None:
    learner = make_learner("ppo", update=NO_SKIPS)
    assert learner.critic is not None
    with torch.no_grad():
        learner.policy.model.norm.weight[0] = math.nan
    before = weights_of(learner.critic)
    with pytest.raises(NonFiniteError, match="the policy's loss is nan"):
        learner.update(strategies.random_samples(0), seed=0)
    assert torch.equal(weights_of(learner.critic), before)


def test_an_overflowing_gradient_of_the_policy_moves_neither_policy_nor_critic() -> None:
    samples = [
        dataclasses.replace(sample, advantages=sample.advantages.sign() * 1e30)
        for sample in strategies.random_samples(0, dtype=torch.float32)
    ]
    learner = make_learner("ppo", dtype=torch.float32, update=NO_SKIPS)
    assert learner.critic is not None
    before = weights_of(learner.policy), weights_of(learner.critic)
    with pytest.raises(NonFiniteError, match="gradient norm is inf"):
        learner.update(samples, seed=0)
    assert torch.equal(weights_of(learner.policy), before[0])
    assert torch.equal(weights_of(learner.critic), before[1])


def test_an_update_that_was_given_up_leaves_no_gradient_behind() -> None:
    samples = strategies.random_samples(0)
    spoilt, fresh = make_learner(update=NO_SKIPS), make_learner()
    with torch.no_grad():
        norm = spoilt.policy.model.norm.weight
        good = norm.clone()
        for parameter in spoilt.policy.parameters():
            parameter.grad = torch.full_like(parameter, 7.0)  # what an interrupted backward pass leaves
        norm[0] = math.nan
    with pytest.raises(NonFiniteError):
        spoilt.update(samples, seed=0)
    with torch.no_grad():
        norm.copy_(good)
    spoilt.update(samples, seed=0)
    fresh.update(samples, seed=0)
    assert torch.equal(weights_of(spoilt.policy), weights_of(fresh.policy))


def with_overflow(samples: Sequence[TrainingSample], prompt: tuple[int, ...]) -> list[TrainingSample]:
    """Samples of which those of one prompt have an advantage whose gradient leaves the numbers of float32."""
    return [
        dataclasses.replace(sample, advantages=sample.advantages.sign() * 1e30)
        if sample.prompt_ids == prompt
        else sample
        for sample in samples
    ]


def test_a_step_that_overflows_is_skipped_and_counted_and_the_others_are_taken() -> None:
    samples = strategies.random_samples(0, dtype=torch.float32)
    config = update_config(num_minibatches=3)
    learner, sound = (make_learner(dtype=torch.float32, update=config) for _ in range(2))
    stats = learner.update(with_overflow(samples, samples[0].prompt_ids), seed=0)
    assert stats.metrics["update/skipped_steps"] == 1.0 and stats.moved
    assert len(stats.skipped) == 1 and "gradient norm is inf" in stats.skipped[0]
    assert all(map(math.isfinite, stats.metrics.values()))
    assert bool(weights_of(learner.policy).isfinite().all())
    assert "update/skipped_steps" not in sound.update(samples, seed=0).metrics


def test_an_update_may_skip_all_of_its_steps_until_too_many_in_a_row_were_skipped() -> None:
    samples = strategies.random_samples(0, dtype=torch.float32)
    update = update_config(max_skipped_steps=2)
    learner = make_learner(dtype=torch.float32, update=update, num_iterations=9)
    bad = [dataclasses.replace(sample, advantages=sample.advantages.sign() * 1e30) for sample in samples]
    before = weights_of(learner.policy)
    for number in (1, 2):
        stats = learner.update(bad, seed=0)
        assert (stats.moved, learner.num_skipped, learner.policy_version) == (False, number, number)
    assert torch.equal(weights_of(learner.policy), before)
    learner.update(samples, seed=0)  # a step that is taken ends the row
    assert learner.num_skipped == 0
    for _ in range(2):
        learner.update(bad, seed=0)
    with pytest.raises(NonFiniteError, match="gradient norm is inf"):
        learner.update(bad, seed=0)


def test_a_skipped_step_leaves_the_scale_of_the_loss_and_a_step_without_signal_does_not_end_the_row() -> None:
    learner = make_learner(dtype=torch.float32, update=update_config(max_skipped_steps=2), num_iterations=9)
    learner.loss_scale = LossScale(4.0, 7, adapts=True)
    samples = strategies.random_samples(0, dtype=torch.float32)
    bad = [dataclasses.replace(sample, advantages=sample.advantages.sign() * 1e30) for sample in samples]
    silent = [dataclasses.replace(sample, advantages=torch.zeros_like(sample.advantages)) for sample in samples]
    scale = learner.loss_scale
    stats = learner.update(bad, seed=0)
    assert (learner.loss_scale, stats.metrics["gradient_norm"], stats.metrics["update/skipped_steps"]) == (
        scale,
        0.0,
        1.0,
    )
    learner.update(silent, seed=0)
    learner.update(bad, seed=0)
    assert learner.num_skipped == 2
    with pytest.raises(NonFiniteError):
        learner.update(bad, seed=0)


def test_no_step_of_the_last_iteration_is_skipped() -> None:
    learner = make_learner(dtype=torch.float32, update=update_config(max_skipped_steps=2), num_iterations=2)
    samples = strategies.random_samples(0, dtype=torch.float32)
    bad = [dataclasses.replace(sample, advantages=sample.advantages.sign() * 1e30) for sample in samples]
    assert learner.update(bad, seed=0).skipped
    with pytest.raises(NonFiniteError, match="gradient norm is inf"):
        learner.update(bad, seed=0)


def count_steps(learner: Learner, samples: Sequence[TrainingSample]) -> tuple[int, dict[str, float]]:
    """The number of the policy's optimizer steps in an update, and its metrics."""
    steps: list[None] = []
    hook = learner.optimizer.register_step_post_hook(lambda *_: steps.append(None))
    stats = learner.update(samples, seed=0)
    hook.remove()
    return len(steps), dict(stats.metrics)


def test_epochs_stop_early_by_the_kl_of_the_last_epoch() -> None:
    samples = on_policy_samples(strategies.tiny_llama())

    def run(epochs: int, max_kl: float) -> tuple[int, dict[str, float]]:
        config = update_config(num_epochs=epochs, early_stop_kl=max_kl)
        return count_steps(make_learner(dtype=torch.float32, learning_rate=1e-3, update=config), samples)

    steps, metrics = run(epochs=2, max_kl=0.0)
    kl_of_second_epoch = 2 * metrics["kl/old"]  # the first epoch's is 0: ratio 1 everywhere
    assert steps == 2
    assert kl_of_second_epoch > 1e-6
    # The mean over both epochs would be half of it and not stop.
    assert run(epochs=4, max_kl=0.75 * kl_of_second_epoch)[0] == 2
    assert run(epochs=4, max_kl=1e6)[0] == 4


PLACEMENTS = [KlConfig(coefficient=1e-6), KlConfig(coefficient=1e-6, apply_to="reward")]


@pytest.mark.parametrize("kl", PLACEMENTS)
def test_epochs_stop_early_by_the_kl_to_the_reference_and_not_at_the_limit_itself(kl: KlConfig) -> None:
    # The reference gives every token 0.5 nats less, the policy stays where it is: k3 = exp(-0.5) + 0.5 - 1 = 0.10653.
    # What the mask leaves out counts neither above nor below the line.
    samples = [
        dataclasses.replace(
            sample,
            ref_logprobs=(sample.old_logprobs - 0.5).index_fill(0, torch.tensor([0]), math.nan),
            loss_mask=sample.loss_mask.index_fill(0, torch.tensor([0]), False),
        )
        for sample in on_policy_samples(strategies.tiny_llama())
    ]
    samples = [sample for sample in samples if bool(sample.loss_mask.any())]

    def run(max_ref_kl: float) -> tuple[int, dict[str, float]]:
        config = update_config(num_epochs=3, early_stop_ref_kl=max_ref_kl)
        return count_steps(make_learner(dtype=torch.float32, learning_rate=1e-12, update=config, kl=kl), samples)

    steps, metrics = run(0.1065)
    assert (steps, metrics["update/epochs"]) == (1, 1.0)
    assert metrics["kl/ref_last_epoch"] == pytest.approx(0.1065307, abs=1e-5)
    assert run(metrics["kl/ref_last_epoch"])[0] == 3  # not above it
    steps, metrics = run(0.1066)
    assert (steps, metrics["update/epochs"]) == (3, 3.0)
    steps, metrics = run(0.0)
    assert steps == 3
    assert not metrics.keys() & {"update/epochs", "kl/ref_last_epoch"}


@pytest.mark.parametrize("kl", PLACEMENTS)
def test_the_kl_to_the_reference_is_that_of_the_last_epoch_and_of_the_policy_that_moved(kl: KlConfig) -> None:
    samples = [
        dataclasses.replace(sample, ref_logprobs=sample.old_logprobs)
        for sample in on_policy_samples(strategies.tiny_llama())
    ]

    def learner(epochs: int, max_ref_kl: float) -> Learner:
        config = update_config(num_epochs=epochs, early_stop_ref_kl=max_ref_kl)
        return make_learner(dtype=torch.float32, learning_rate=1e-4, update=config, kl=kl)

    # The reference is the policy that sampled: 0 in the first epoch, and then as far as the first step went.
    after_one = learner(1, 1e6)
    assert count_steps(after_one, samples)[1]["kl/ref_last_epoch"] == pytest.approx(0.0, abs=1e-9)
    sequences = [TokenSequence(prompt_ids=one.prompt_ids, completion_ids=one.completion_ids) for one in samples]
    moved = torch.cat(score_sequences(after_one.policy, sequences, tokens_per_microbatch=256))
    d = (moved - torch.cat([sample.ref_logprobs for sample in samples])).double()
    expected = float((torch.exp(-d) + d - 1.0).mean())
    assert expected > 1e-5
    assert count_steps(learner(2, 1e6), samples)[1]["kl/ref_last_epoch"] == pytest.approx(expected, rel=1e-2)
    assert count_steps(learner(4, 0.75 * expected), samples)[0] == 2  # the mean over both epochs would not stop
    assert count_steps(learner(4, 1e6), samples)[0] == 4


def test_on_the_first_pass_nothing_is_clipped_and_later_the_ratio_moves() -> None:
    policy = strategies.tiny_llama()
    samples = on_policy_samples(policy)
    first = (
        make_learner(dtype=torch.float32, update=update_config(rollout_correction=RolloutCorrectionConfig()))
        .update(samples, seed=0)
        .metrics
    )
    assert (first["clip/fraction"], first["kl/old"]) == (0.0, 0.0)
    assert first["mismatch/ess"] == pytest.approx(1.0, abs=1e-6)
    assert first["mismatch/max_abs"] < 1e-4
    several = make_learner(dtype=torch.float32, update=update_config(num_epochs=4)).update(samples, seed=0).metrics
    assert several["clip/fraction"] == several["clip/low"] + several["clip/high"] > 0.0
    assert several["kl/old"] > 0.0


def test_one_step_needs_no_old_log_probabilities_and_more_steps_do() -> None:
    assert not make_learner(update=update_config()).needs_old_logprobs
    assert make_learner(update=update_config(num_epochs=2)).needs_old_logprobs
    assert make_learner(update=update_config(num_minibatches=2)).needs_old_logprobs


def test_while_the_critic_warms_up_the_policy_stays_as_it_is() -> None:
    samples = strategies.random_samples(0)
    learner = make_learner("ppo", critic=CriticConfig(warmup_iterations=2, learning_rate=1e-3))
    assert learner.critic is not None
    policy, critic = weights_of(learner.policy), weights_of(learner.critic)
    for version in (1, 2):
        stats = learner.update(samples, seed=version)
        assert (stats.moved, stats.policy_version) == (False, version)
        assert torch.equal(weights_of(learner.policy), policy)
        assert not torch.equal(weights_of(learner.critic), critic)
        assert (stats.metrics["loss/policy"], stats.metrics["gradient_norm"]) == (0.0, 0.0)
        assert stats.metrics["entropy"] > 0.1  # measured all the same
    assert learner.update(samples, seed=3).moved
    assert not torch.equal(weights_of(learner.policy), policy)


def test_the_value_head_follows_the_schedule_of_its_backbone() -> None:
    optim = OptimConfig(warmup_steps=4, schedule="linear")
    learner = make_learner("ppo", update=update_config(optim=optim), critic=CriticConfig(learning_rate=1e-3))
    assert learner.critic is not None
    head = learner.critic.head.weight
    groups = [g for g in learner.critic_optimizer.param_groups if any(p is head for p in g["params"])]
    rates = []
    for seed in range(3):
        rates.append(groups[0]["lr"])
        learner.update(strategies.random_samples(seed), seed=seed)
    assert len(groups) == 1
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3])


def test_the_learning_rates_of_policy_and_critic_are_their_own() -> None:
    learner = make_learner("ppo", learning_rate=1e-2, critic=CriticConfig(learning_rate=1e-4))
    metrics = learner.update(strategies.random_samples(0), seed=0).metrics
    assert (metrics["learning_rate"], metrics["critic/learning_rate"]) == (1e-2, 1e-4)


def test_the_same_seed_gives_the_same_weights_bit_for_bit_and_another_seed_does_not() -> None:
    def run(seed: int) -> torch.Tensor:
        learner = make_learner(dtype=torch.float32, update=update_config(num_minibatches=3, num_epochs=2))
        learner.update(strategies.random_samples(0, dtype=torch.float32), seed=seed)
        return weights_of(learner.policy)

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))


def test_the_kl_controller_moves_with_what_it_observes() -> None:
    learner = make_learner(kl=KlConfig(coefficient=0.1, apply_to="reward", target=2.0, horizon=100))
    learner.observe_kl(4.0, 50)
    assert learner.kl.coefficient == pytest.approx(0.1 * (1 + 0.2 * 0.5))


def test_the_critic_may_have_a_schedule_and_a_clipping_of_its_own() -> None:
    optim = OptimConfig(warmup_steps=4, max_grad_norm=1e-3)
    learner = make_learner("ppo", critic=CriticConfig(learning_rate=1e-3, optim=optim, clip_range=0.0))
    assert learner.critic is not None
    seen = []
    learner.critic_optimizer.register_step_pre_hook(
        lambda optimizer, *_: seen.append(
            torch.cat(
                [p.grad.flatten() for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            )
        )
    )
    metrics = learner.update(strategies.random_samples(0), seed=0).metrics
    assert metrics["critic/learning_rate"] == pytest.approx(0.5e-3)  # the second of four warm-up steps comes next
    assert metrics["learning_rate"] == 1e-2
    assert float(seen[0].norm()) == pytest.approx(1e-3, rel=1e-4)
    assert metrics["critic/gradient_norm"] > 1e-2


def test_a_huber_loss_bounds_what_one_wild_return_does_to_the_critic() -> None:
    def norm(**settings: float) -> float:
        samples = strategies.random_samples(0)
        samples[0] = dataclasses.replace(samples[0], returns=torch.full_like(samples[0].returns, 1e4))
        learner = make_learner("ppo", critic=CriticConfig(clip_range=0.0, **settings))
        return float(learner.update(samples, seed=0).metrics["critic/gradient_norm"])

    assert norm(huber_delta=1.0) < 1e-2 * norm()
