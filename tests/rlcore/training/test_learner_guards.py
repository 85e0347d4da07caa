"""Guards of the learner: skipped steps, early stops, warm-up, penalties, and its metrics."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from rlcore.algorithms.kl import PenaltyController
from rlcore.checks.health import HealthMonitor
from rlcore.config import CriticConfig, HealthConfig, KlConfig, OptimConfig, RolloutCorrectionConfig
from rlcore.errors import NonFiniteError
from rlcore.models.policy import completion_logprobs, score_sequences
from rlcore.text.packing import TokenSequence, pack
from rlcore.training.learner import Learner
from rlcore.training.minibatches import num_policy_tokens, token_sequences
from rlcore.training.optim import LossScale
from rlcore.types import TrainingSample
from tests import strategies
from tests.learners import (
    make_learner,
    on_policy_samples,
    overflowing,
    recorded_gradients,
    shared_learner,
    silenced,
    update_config,
    weights_of,
)
from tests.rlcore.training.test_learner import prompts_forwarded, with_silent_group

NO_SKIPS = update_config(max_skipped_steps=0)


@pytest.mark.parametrize(("field", "bad"), [("advantages", math.nan), ("returns", math.inf)])
def test_non_finite_sample_is_named(field: str, bad: float) -> None:
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


def test_non_finite_loss_stops_before_step() -> None:
    learner = make_learner("ppo", update=NO_SKIPS)
    assert learner.critic is not None
    with torch.no_grad():
        learner.policy.model.norm.weight[0] = math.nan
    before = weights_of(learner.critic)
    with pytest.raises(NonFiniteError, match="the policy's loss is nan"):
        learner.update(strategies.random_samples(0), seed=0)
    assert torch.equal(weights_of(learner.critic), before)


def test_overflowing_gradient_moves_no_model() -> None:
    samples = overflowing(strategies.random_samples(0, dtype=torch.float32))
    learner = make_learner("ppo", dtype=torch.float32, update=NO_SKIPS)
    assert learner.critic is not None
    before = weights_of(learner.policy), weights_of(learner.critic)
    with pytest.raises(NonFiniteError, match="gradient norm is inf"):
        learner.update(samples, seed=0)
    assert torch.equal(weights_of(learner.policy), before[0])
    assert torch.equal(weights_of(learner.critic), before[1])


def test_failed_update_leaves_no_gradient() -> None:
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


def test_overflowing_step_is_skipped() -> None:
    samples = strategies.random_samples(0, dtype=torch.float32)
    config = update_config(num_minibatches=3)
    learner, sound = (make_learner(dtype=torch.float32, update=config) for _ in range(2))
    stats = learner.update(overflowing(samples, samples[0].prompt_ids), seed=0)
    assert stats.metrics["update/skipped_steps"] == 1.0 and stats.moved
    assert len(stats.skipped) == 1 and "gradient norm is inf" in stats.skipped[0]
    assert all(map(math.isfinite, stats.metrics.values()))
    assert bool(weights_of(learner.policy).isfinite().all())
    assert "update/skipped_steps" not in sound.update(samples, seed=0).metrics


def test_too_many_skipped_steps_are_an_error() -> None:
    samples = strategies.random_samples(0, dtype=torch.float32)
    update = update_config(max_skipped_steps=2)
    learner = make_learner(dtype=torch.float32, update=update, num_iterations=9)
    bad = overflowing(samples)
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


def test_skipped_step_keeps_loss_scale() -> None:
    learner = make_learner(dtype=torch.float32, update=update_config(max_skipped_steps=2), num_iterations=9)
    learner.loss_scale = LossScale(4.0, 7, adapts=True)
    samples = strategies.random_samples(0, dtype=torch.float32)
    bad = overflowing(samples)
    scale = learner.loss_scale
    stats = learner.update(bad, seed=0)
    assert (learner.loss_scale, stats.metrics["gradient_norm"], stats.metrics["update/skipped_steps"]) == (
        scale,
        0.0,
        1.0,
    )
    learner.update(silenced(samples), seed=0)
    learner.update(bad, seed=0)
    assert learner.num_skipped == 2
    with pytest.raises(NonFiniteError):
        learner.update(bad, seed=0)


def test_last_iteration_skips_no_step() -> None:
    learner = make_learner(dtype=torch.float32, update=update_config(max_skipped_steps=2), num_iterations=2)
    samples = strategies.random_samples(0, dtype=torch.float32)
    bad = overflowing(samples)
    assert learner.update(bad, seed=0).skipped
    with pytest.raises(NonFiniteError, match="gradient norm is inf"):
        learner.update(bad, seed=0)


def count_steps(learner: Learner, samples: Sequence[TrainingSample]) -> tuple[int, dict[str, float]]:
    steps: list[None] = []
    hook = learner.optimizer.register_step_post_hook(lambda *_: steps.append(None))
    stats = learner.update(samples, seed=0)
    hook.remove()
    return len(steps), dict(stats.metrics)


def test_early_stop_by_kl_of_last_epoch() -> None:
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
def test_early_stop_by_kl_to_reference(kl: KlConfig) -> None:
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
def test_kl_to_reference_is_of_last_epoch(kl: KlConfig) -> None:
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


def test_first_pass_clips_nothing() -> None:
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


def test_needs_old_logprobs() -> None:
    several = [update_config(), update_config(num_epochs=2), update_config(num_minibatches=2)]
    assert [update.needs_old_logprobs for update in several] == [False, True, True]


def test_policy_waits_for_critic_warmup() -> None:
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


def test_observed_kl_moves_coefficient() -> None:
    learner = make_learner(kl=KlConfig(coefficient=0.1, apply_to="reward", target=2.0, horizon=100))
    learner.observe_kl(4.0, 50)
    assert learner.kl.coefficient == pytest.approx(0.1 * (1 + 0.2 * 0.5))


def test_critic_has_own_schedule_and_clipping() -> None:
    optim = OptimConfig(warmup_steps=4, max_grad_norm=1e-3)
    learner = make_learner("ppo", critic=CriticConfig(learning_rate=1e-3, optim=optim, clip_range=0.0))
    assert learner.critic is not None
    with recorded_gradients() as seen:  # the critic steps first
        metrics = learner.update(strategies.random_samples(0), seed=0).metrics
    assert metrics["critic/learning_rate"] == pytest.approx(0.5e-3)  # the second of four warm-up steps comes next
    assert metrics["learning_rate"] == 1e-2
    assert float(seen[0].norm()) == pytest.approx(1e-3, rel=1e-4)
    assert metrics["critic/gradient_norm"] > 1e-2


SEVERAL = update_config(num_epochs=2, num_minibatches=2)


def samples_with_hole(learner: Learner) -> list[TrainingSample]:
    """Samples with the learner's own log-probabilities, one token of them masked and NaN."""
    first, *others = on_policy_samples(learner.policy)
    hole = torch.zeros_like(first.loss_mask).index_fill(0, torch.tensor([0]), True)
    masked = {"loss_mask": first.loss_mask & ~hole, "old_logprobs": first.old_logprobs.masked_fill(hole, torch.nan)}
    return [dataclasses.replace(first, **masked), *others]


def penalty_learner(target: float = 0.01, *, budget: int = 8192, **settings: object) -> Learner:
    update = dataclasses.replace(SEVERAL, tokens_per_microbatch=budget)
    learner = make_learner("ppo_penalty", **({"update": update, "learning_rate": 1e-3} | settings))
    learner.penalty = PenaltyController(coefficient=1.0, target=target)
    return learner


def test_penalty_follows_kl_after_update() -> None:
    learner = penalty_learner(budget=16)  # several micro-batches
    samples = samples_with_hole(learner)
    metrics = learner.update(samples, seed=0).metrics
    after = torch.cat(score_sequences(learner.policy, token_sequences(samples), tokens_per_microbatch=64))
    mask = torch.cat([sample.loss_mask for sample in samples])
    d = (after - torch.cat([sample.old_logprobs for sample in samples]))[mask].double()
    measured = float((d.exp() - d - 1.0).mean())
    assert measured > 1e-6
    assert metrics["kl/after_update"] == pytest.approx(measured, rel=1e-6)
    assert metrics["kl/after_update"] != metrics["kl/old"]  # which has the policy before each step
    assert metrics["kl/penalty_coefficient"] == 1.0
    for target, expected in ((measured / 2, 2.0), (measured, 1.0), (measured * 2, 0.5)):
        other = penalty_learner(target)
        other.update(samples, seed=0)
        assert other.penalty == PenaltyController(coefficient=expected, target=target)
        assert other.update(samples, seed=1).metrics["kl/penalty_coefficient"] == expected


def test_penalty_stays_if_policy_did_not_move() -> None:
    learner = penalty_learner(critic=CriticConfig(warmup_iterations=1))
    samples = samples_with_hole(learner)
    assert "kl/after_update" not in learner.update(samples, seed=0).metrics
    assert learner.penalty == PenaltyController(coefficient=1.0, target=0.01)
    assert "kl/after_update" in learner.update(samples, seed=1).metrics


def test_penalty_keeps_silent_groups() -> None:
    learner = make_learner("grpo")
    learner.penalty = PenaltyController(coefficient=1.0, target=0.01)
    assert prompts_forwarded(learner, with_silent_group(5)) == {1, 2, 3}


CORRECTED = RolloutCorrectionConfig(mode="truncate")


def warming_up(make: Any, **settings: Any) -> Learner:
    learner: Learner = make(critic=CriticConfig(warmup_iterations=1, **settings))
    return learner


LEARNERS = {
    "grpo": lambda: make_learner(),
    "kl in the loss": lambda: make_learner(kl=KlConfig(coefficient=0.1)),
    "kl limit": lambda: make_learner(
        update=update_config(early_stop_ref_kl=1.0), kl=KlConfig(coefficient=0.1, apply_to="reward")
    ),
    "several steps": lambda: make_learner(update=update_config(num_epochs=2, num_minibatches=2)),
    "ppo": lambda: warming_up(lambda **settings: make_learner("ppo", **settings)),
    "ppo head": lambda: warming_up(shared_learner, architecture="shared"),
    "ppo kl in the loss": lambda: warming_up(
        lambda **settings: make_learner("ppo", kl=KlConfig(coefficient=0.1), **settings)
    ),
}


@pytest.mark.parametrize("name", LEARNERS)
def test_every_update_has_the_same_metrics(name: str) -> None:
    learner, samples = LEARNERS[name](), strategies.random_samples(0)
    iterations = [silenced(samples), samples, silenced(samples), samples]
    rows = [dict(learner.update(one, seed=seed).metrics) for seed, one in enumerate(iterations)]
    assert len({frozenset(row) for row in rows}) == 1
    assert {"entropy", "kl/old", "clip/fraction", "mismatch/kl", "mismatch/ess", "gradient_norm"} <= set(rows[0])
    assert all(math.isfinite(value) for row in rows for value in row.values())


@pytest.mark.parametrize(("epochs", "minibatches"), [(1, 1), (3, 2)])
def test_token_fraction_is_share_of_groups_with_signal(epochs: int, minibatches: int) -> None:
    samples = strategies.random_samples(0)
    silent = samples[0].prompt_ids
    kept = [sample for sample in samples if sample.prompt_ids != silent]
    update = update_config(num_epochs=epochs, num_minibatches=minibatches)
    metrics = make_learner(update=update).update(silenced(samples, silent), seed=0).metrics
    assert metrics["update/token_fraction"] == pytest.approx(num_policy_tokens(kept) / num_policy_tokens(samples))
    assert 0.1 < metrics["update/token_fraction"] < 0.9
    assert make_learner(update=update).update(samples, seed=0).metrics["update/token_fraction"] == 1.0
    with_kl = make_learner(update=update, kl=KlConfig(coefficient=0.1))
    assert with_kl.update(silenced(samples, silent), seed=0).metrics["update/token_fraction"] == 1.0


def test_metrics_without_signal_describe_policy() -> None:
    learner = make_learner(update=update_config(rollout_correction=CORRECTED))
    samples = silenced(strategies.random_samples(0))
    metrics = learner.update(samples, seed=0).metrics
    (batch,) = pack(token_sequences(samples), tokens_per_microbatch=10_000)
    logprobs, entropy = completion_logprobs(learner.policy, batch)
    mask = torch.cat([samples[number].loss_mask for number in batch.sequences.tolist()])
    sampled = torch.cat([samples[number].sampler_logprobs for number in batch.sequences.tolist()])
    difference = (logprobs - sampled)[mask].detach()
    assert metrics["update/token_fraction"] == 1.0
    assert metrics["entropy"] == pytest.approx(float(entropy[mask].mean().detach()), rel=1e-9)
    assert metrics["mismatch/mean_abs"] == pytest.approx(float(difference.abs().mean()), rel=1e-9)
    assert metrics["mismatch/max_abs"] == pytest.approx(float(difference.abs().max()), rel=1e-9)
    assert (metrics["kl/old"], metrics["clip/fraction"], metrics["gradient_norm"]) == (0.0, 0.0, 0.0)


def test_metrics_without_signal_need_one_micro_batch() -> None:
    learner = make_learner(update=update_config(tokens_per_microbatch=16))
    samples = silenced(strategies.random_samples(0))
    batches = pack(token_sequences(samples), tokens_per_microbatch=16)
    assert len(batches) > 2
    shares = {round(learner.update(samples, seed=seed).metrics["update/token_fraction"], 6) for seed in range(12)}
    possible = {
        round(
            num_policy_tokens([samples[number] for number in batch.sequences.tolist()]) / num_policy_tokens(samples), 6
        )
        for batch in batches
    }
    assert shares <= possible
    assert len(shares) > 1  # not the longest every time


def clip_history(*fractions: float | None) -> list[dict[str, float]]:
    """A history of clip fractions; None: an iteration without a gradient, whose fraction is 0."""
    return [
        {"iteration": place, "clip/fraction": fraction or 0.0, "gradient_norm": 0.0 if fraction is None else 1.0}
        for place, fraction in enumerate(fractions, start=1)
    ]


def test_iterations_without_step_do_not_count_as_clipped() -> None:
    patient = HealthMonitor(HealthConfig()).update(clip_history(0.1, 0.9, 0.9, None, 0.9, None, 0.9))
    assert [(finding.level, finding.since) for finding in patient.findings] == [("alarm", 2)]
    assert patient.last_healthy == 0
    stopped = HealthMonitor(HealthConfig()).update(clip_history(0.1, 0.9, 0.9, None, 0.9, None, 0.9, 0.9))
    assert stopped.stop is not None
    assert HealthMonitor(HealthConfig()).update(clip_history(None, None, None)).findings == ()
