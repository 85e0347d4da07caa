"""Weight sync: send the learner's weights to the engine, and verify them.

After each sync the weights are compared. Log-probabilities are compared on probes before the first update and after the
first sync of a process, and on the rollouts in each update, which scores them anyway. With prefetch, rollouts are older
than the learner's weights, so each sync has probes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from rlcore.checks.canaries.sync import (
    EngineCalibration,
    ExpectedWeights,
    calibrate_engine,
    require_version,
    rollouts_canary,
    sample_probes,
    sync_canary,
    weights_canary,
)
from rlcore.components import Components
from rlcore.loop.run import Run, counted
from rlcore.sampling.base import Sampler, SamplingParams, replicas_of
from rlcore.seeding import derive_seed
from rlcore.training.update_stats import UpdateStats
from rlcore.types import Rollout


def calibrate_engines(components: Components) -> tuple[list[EngineCalibration], list[Rollout]]:
    """Measure each engine while all of them hold the learner's first weights.

    Return a calibration per engine, and the completions that they sampled for the comparison. Raise as
    :func:`verify_sync`.
    """
    expected, calibrations, samples = _expected_weights(components), list[EngineCalibration](), list[Rollout]()
    for engine in replicas_of(components.engine):  # each holds its own weights
        probes = _probes(components, engine)
        calibrations.append(calibrate_engine(engine, probes, expected))
        samples += probes
    return calibrations, samples


def calibration_messages(calibrations: Sequence[EngineCalibration]) -> list[str]:
    """Return log messages on the comparison before the first update."""
    largest = max(calibration.noise.mean for calibration in calibrations)
    messages = [f"weight sync verified mean_log_odds_diff={largest:.2g}"]
    if unverified := sorted(set().union(*(calibration.unverified for calibration in calibrations))):
        messages.append(f"weights cannot be compared in {', '.join(unverified)}: only log-probabilities verify a sync")
    return messages


def sync_when_idle(run: Run) -> dict[str, float]:
    """Sync the weights of a run whose engine is idle, and raise as :func:`verify_sync`.

    Return metrics ``sync/...`` of the probes if the run prefetches; else they are those of the rollouts.
    """
    components, version = run.components, run.components.learner.policy_version
    prefetches = components.config.sampling.staleness > 0
    components.engine.load_weights(_state(components), policy_version=version)
    with counted(run.check_seconds, "canaries"):
        metrics = verify_sync(components, run.calibrations, by_probes=prefetches or not run.is_sync_proven)
    run.served_version, run.is_sync_proven = version, True
    return metrics if prefetches else {}


def verify_sync(
    components: Components, calibrations: Sequence[EngineCalibration], *, by_probes: bool = True
) -> dict[str, float]:
    """Verify that every engine serves the learner's weights; ``by_probes``: and computes what the learner does.

    Return metrics ``sync/...`` of the probes, the maximum over all engines.

    Raises:
        StaleSamplerError, CanaryError: An engine serves other weights, or computes differently.
    """
    expected, found = _expected_weights(components), list[dict[str, float]]()
    for engine, calibration in zip(replicas_of(components.engine), calibrations, strict=True):
        if by_probes:
            found.append(sync_canary(engine, _probes(components, engine, group_size=2), expected, calibration))
        else:
            weights_canary(engine, expected.state, calibration, policy_version=expected.policy_version)
    return _largest(found)


def verify_rollouts(run: Run, rollouts: Sequence[Rollout], stats: UpdateStats) -> dict[str, float]:
    """Verify that the engines sampled an iteration's rollouts with the learner's weights before its update, ``stats``.

    Return metrics ``sync/...``, the maximum over all engines. Nothing is verified if the run prefetches.
    """
    components, version = run.components, stats.policy_version - 1
    if components.config.sampling.staleness:
        return {}
    with counted(run.check_seconds, "canaries"):
        require_version(version, (sample.policy_version for rollout in rollouts for sample in rollout.samples))
        return _largest(
            rollouts_canary(
                stats.first_tokens,
                run.calibrations,
                temperature=components.config.sampling.temperature,
                dtype=components.coarser_dtype,
                seed=derive_seed(components.seed, "compared tokens", version),
            )
        )


def _largest(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: max(each[name] for each in metrics) for name in (metrics[0] if metrics else ())}


def prepare_weight_load(run: Run) -> Callable[[], None] | None:
    """Return a function that loads the current weights between two batches, or None if the engine has them.

    It loads a copy, because the learner continues to train. The canary checks only version and weights.
    """
    components, version = run.components, run.components.learner.policy_version
    if run.served_version == version:
        return None
    state, run.served_version = _state(components), version

    def load() -> None:
        components.engine.load_weights(state, policy_version=version)
        for engine, calibration in zip(replicas_of(components.engine), run.calibrations, strict=True):
            weights_canary(engine, state, calibration, policy_version=version)

    return load


def _state(components: Components) -> Mapping[str, torch.Tensor]:
    """Return the learner's weights; a copy if the engine may load them after later updates."""
    learner = components.learner
    return learner.copy_weights() if components.config.sampling.staleness > 1 else learner.weights()


def _expected_weights(components: Components) -> ExpectedWeights:
    learner = components.learner
    return ExpectedWeights(
        state=learner.weights(),
        policy_version=learner.policy_version,
        score=learner.scores,
        temperature=components.config.sampling.temperature,
        dtype=components.coarser_dtype,
    )


def _probes(components: Components, engine: Sampler, *, group_size: int = 1) -> list[Rollout]:
    """Sample completions that depend only on the weights and the run's seed."""
    sampling = components.config.sampling
    params = SamplingParams(temperature=sampling.temperature, max_new_tokens=sampling.max_new_tokens, num_samples=1)
    seed = derive_seed(components.seed, "probes", components.learner.policy_version)
    return sample_probes(engine, components.prompts, params, seed=seed, group_size=group_size)
