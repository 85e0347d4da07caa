"""The engine's weights follow the learner's, and both are compared: before the first update and after each sync."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from rlcore.canaries import Baseline, Truth, first_canary, sample_probes, sync_canary, token_scores
from rlcore.models.lora import merged_state
from rlcore.sampling.base import Sampler, SamplingParams
from rlcore.sampling.replicas import members_of
from rlcore.seeding import derive_seed
from rlcore.types import Rollout
from tasks.steps.rl.run import RlRun
from tasks.steps.rollout_engine import sync_dtype


def compare_engines(run: RlRun) -> list[Rollout]:
    """Learn what a sound engine looks like, from each, while all of them hold the learner's first weights.

    Returns:
        Completions that they sampled for it.
    """
    truth, samples = _truth(run), list[Rollout]()
    run.baselines = []
    for engine in members_of(run.engine):  # each holds weights of its own
        probes = _probes(run, engine)
        run.baselines.append(first_canary(engine, probes, truth))
        samples += probes
    _report(run, run.baselines)
    return samples


def sync_weights(run: RlRun) -> dict[str, float]:
    """Push the learner's weights to the engine, then prove that it serves them; of several the largest figures."""
    run.engine.load_weights(merged_state(run.learner.policy), policy_version=run.learner.policy_version)
    truth = _truth(run)
    figures = [
        sync_canary(engine, _probes(run, engine), truth, baseline)
        for engine, baseline in zip(members_of(run.engine), run.baselines, strict=True)
    ]
    return {name: max(each[name] for each in figures) for name in figures[0]}


def _truth(run: RlRun) -> Truth:
    learner, sampling = run.learner, run.rl.sampling
    score = partial(
        token_scores,
        learner.policy,
        temperature=sampling.temperature,
        tokens_per_microbatch=learner.tokens_per_microbatch,
    )
    return Truth(
        state=merged_state(learner.policy),
        policy_version=learner.policy_version,
        score=score,
        temperature=sampling.temperature,
        dtype=sync_dtype(run.engine_config, run.runtime),
    )


def _probes(run: RlRun, engine: Sampler) -> list[Rollout]:
    """Completions that the engine samples now; which ones is decided by the weights and the run's seed alone."""
    sampling = run.rl.sampling
    params = SamplingParams(temperature=sampling.temperature, max_new_tokens=sampling.max_new_tokens, num_samples=1)
    return sample_probes(engine, run.prompts, params, seed=derive_seed(run.seed, "probes", run.learner.policy_version))


def _report(run: RlRun, baselines: Sequence[Baseline]) -> None:
    loudest = max(baseline.noise.mean for baseline in baselines)
    run.context.progress(f"engine and learner agree before any update: log-odds differ by {loudest:.2g} on average")
    if hidden := sorted(set().union(*(baseline.hidden for baseline in baselines))):
        run.context.progress(
            f"the engine hides its weights in {', '.join(hidden)}: log-probabilities alone prove a sync there"
        )
