from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from rlcore.checks.health import check_health
from rlcore.config import CriticConfig, HealthConfig, KlConfig, RolloutCorrectionConfig
from rlcore.models.policy import completion_logprobs
from rlcore.text.packing import pack
from rlcore.training.learner import Learner
from rlcore.training.minibatches import num_policy_tokens, token_sequences
from rlcore.types import TrainingSample
from tests import strategies
from tests.learners import make_learner, on_policy_samples, shared_learner, update_config

CORRECTED = RolloutCorrectionConfig(mode="truncate")


def silenced(samples: Sequence[TrainingSample], *, prompts: set[tuple[int, ...]] | None = None) -> list[TrainingSample]:
    """The samples, those of some prompts (or all) without advantages."""
    return [
        dataclasses.replace(sample, advantages=torch.zeros_like(sample.advantages))
        if prompts is None or sample.prompt_ids in prompts
        else sample
        for sample in samples
    ]


def warming_up(make: Any, **settings: Any) -> Learner:
    """A learner whose critic alone learns in the first iteration."""
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
def test_every_iteration_has_the_same_metrics_whether_or_not_anything_is_learned(name: str) -> None:
    learner, samples = LEARNERS[name](), strategies.random_samples(0)
    iterations = [silenced(samples), samples, silenced(samples), samples]
    rows = [dict(learner.update(one, seed=seed).metrics) for seed, one in enumerate(iterations)]
    assert len({frozenset(row) for row in rows}) == 1
    assert {"entropy", "kl/old", "clip/fraction", "mismatch/kl", "mismatch/ess", "gradient_norm"} <= set(rows[0])
    assert all(math.isfinite(value) for row in rows for value in row.values())


@pytest.mark.parametrize(("epochs", "minibatches"), [(1, 1), (3, 2)])
def test_what_was_measured_is_the_share_of_the_tokens_of_groups_with_a_signal(epochs: int, minibatches: int) -> None:
    samples = strategies.random_samples(0)
    silent = {samples[0].prompt_ids}
    kept = [sample for sample in samples if sample.prompt_ids not in silent]
    update = update_config(num_epochs=epochs, num_minibatches=minibatches)
    metrics = make_learner(update=update).update(silenced(samples, prompts=silent), seed=0).metrics
    assert metrics["update/token_fraction"] == pytest.approx(num_policy_tokens(kept) / num_policy_tokens(samples))
    assert 0.1 < metrics["update/token_fraction"] < 0.9
    assert make_learner(update=update).update(samples, seed=0).metrics["update/token_fraction"] == 1.0
    with_kl = make_learner(update=update, kl=KlConfig(coefficient=0.1))
    assert with_kl.update(silenced(samples, prompts=silent), seed=0).metrics["update/token_fraction"] == 1.0


def test_where_all_groups_are_silent_the_metrics_are_those_of_the_policy_as_it_is() -> None:
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


def test_where_all_groups_are_silent_no_more_than_one_micro_batch_is_measured() -> None:
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


def test_a_measurement_changes_nothing_that_is_learned_later() -> None:
    samples = on_policy_samples(strategies.tiny_llama())
    plain, measured = (make_learner(dtype=torch.float32) for _ in range(2))
    measured.update(silenced(samples), seed=0)
    plain.policy_version = measured.policy_version
    for learner in (plain, measured):
        learner.update(samples, seed=1)
    for one, other in zip(plain.policy.parameters(), measured.policy.parameters(), strict=True):
        assert torch.equal(one, other)


def clipped(*fractions: float | None) -> list[dict[str, float]]:
    """A history of clip fractions; None: an iteration without a gradient, whose fraction is 0."""
    return [
        {"iteration": place, "clip/fraction": fraction or 0.0, "gradient_norm": 0.0 if fraction is None else 1.0}
        for place, fraction in enumerate(fractions, start=1)
    ]


def test_iterations_without_a_step_neither_end_nor_prolong_a_row_of_clipped_ones() -> None:
    patient = check_health(clipped(0.1, 0.9, 0.9, None, 0.9, None, 0.9), HealthConfig())
    assert [(finding.level, finding.since) for finding in patient.findings] == [("alarm", 2)]
    assert patient.last_healthy == 0
    stopped = check_health(clipped(0.1, 0.9, 0.9, None, 0.9, None, 0.9, 0.9), HealthConfig())
    assert stopped.stop is not None
    assert check_health(clipped(None, None, None), HealthConfig()).findings == ()
