"""Memory by part is measured once in a run: in the first update that moves the policy."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from rlcore.loop.history import History
from rlcore.loop.update import measured_update
from rlcore.training.local_learner import LocalLearner
from rlcore.training.update_stats import UpdateStats
from rlcore.types import TrainingSample
from tests import strategies
from tests.learners import make_learner

SAMPLES = strategies.random_samples(0)
WITHOUT_SIGNAL = [dataclasses.replace(sample, advantages=torch.zeros_like(sample.advantages)) for sample in SAMPLES]


def make_run(name: str = "grpo") -> Any:
    """Return the fields of a run that the measurement reads."""
    learner = make_learner(name, dtype=torch.float32)
    components = SimpleNamespace(
        learner=LocalLearner(learner),
        engine_dtype=torch.float32,
        config=learner.config,
        prompts=[SimpleNamespace(token_ids=(1, 2, 3))],
    )
    return SimpleNamespace(components=components, history=History(Path("nowhere")))


def size_of(run: Any) -> int:
    return run.components.learner.facts.num_parameters


def iterate(run: Any, samples: list[TrainingSample]) -> dict[str, float]:
    """One iteration's memory metrics, kept in the history as a run keeps them."""
    stats, metrics = measured_update(run, samples, seed=len(run.history))
    assert isinstance(stats, UpdateStats)
    run.history.append({"iteration": len(run.history) + 1, **metrics})
    return dict(metrics)


def test_an_update_without_signal_is_not_measured_and_the_first_that_moves_the_policy_is_the_only_one() -> None:
    run = make_run()
    assert iterate(run, WITHOUT_SIGNAL) == {}
    assert iterate(run, WITHOUT_SIGNAL) == {}
    metrics = iterate(run, SAMPLES)
    size = size_of(run)
    assert metrics["memory/gradients_bytes"] == 4 * size
    assert metrics["memory/optimizer_bytes"] >= 8 * size  # two moments
    assert metrics["memory/activations_bytes"] > 0
    assert iterate(run, SAMPLES) == {}


def test_a_critic_that_learns_alone_is_not_the_whole_of_an_update() -> None:
    run = make_run("ppo")
    assert iterate(run, WITHOUT_SIGNAL) == {}
    both = size_of(run) + sum(p.numel() for p in run.components.learner.learner.critic.parameters())
    assert iterate(run, SAMPLES)["memory/gradients_bytes"] == 4 * both
