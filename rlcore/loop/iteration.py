"""The RL iteration (sample, score, update, sync, evaluate, record, check, checkpoint), and a run of iterations."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager

from rlcore.checks.audit.audit import Audit
from rlcore.checks.canaries.rewards import known_answers_canary, terms_canary
from rlcore.checks.causes import unchanged
from rlcore.checks.health import HealthMonitor
from rlcore.checks.settings import require_disjoint
from rlcore.components import Components
from rlcore.errors import ConfigError, LearnerLostError, NonFiniteError
from rlcore.loop.prefetch import RolloutPrefetcher, mean_staleness
from rlcore.loop.prompt_schedule import SampledGroups, schedule_of
from rlcore.loop.recorder import LogRecorder, Recorder
from rlcore.loop.rollouts import (
    branch_metrics,
    collect_groups,
    dataset_rewards,
    episode_metrics,
    evaluate_held_out,
    record_group_signals,
    replacement_metrics,
)
from rlcore.loop.run import (
    START,
    Checkpoints,
    History,
    Run,
    TrainResult,
    check_run_health,
    counted,
    restore_last_healthy,
    timed,
)
from rlcore.loop.update import update_policy
from rlcore.loop.weight_sync import calibrate_engines, calibration_messages, sync_when_idle
from rlcore.sampling.base import sleep_engine, take_metrics
from rlcore.training.local_learner import LocalLearner
from rlcore.types import Rollout, ScoredRollout


def train(components: Components, recorder: Recorder | None = None) -> TrainResult:
    """Train to the last iteration and return the result. Resume from the newest checkpoint if there is one.

    Without a ``recorder`` the run writes to a log (:class:`rlcore.loop.recorder.LogRecorder`).

    Raises:
        RlcoreError: A component fails, a canary finds a silent error, or a health rule stops a run that was never
            healthy. Checkpoints stay: the same call with working components resumes from the newest one.
    """
    with open_run(components, recorder or LogRecorder(components.config.num_iterations)) as run:
        while not run.is_over:
            iterate(run)
        result = finish(run)
        if not result.took_steps:
            run.recorder.log(unchanged(components.config.learning_rate, took_steps=False))
        return result


@contextmanager
def open_run(components: Components, recorder: Recorder) -> Iterator[Run]:
    """Open a run, verify its engines and rewards, and resume from the newest checkpoint if there is one.

    On exit the engine is idle and the last checkpoint is on disk. If the run is interrupted between two updates, that
    checkpoint is of the last iteration.

    Raises:
        ConfigError: The run evaluates but has no held-out problems.
        StaleSamplerError, CanaryError: An engine or a reward is broken.
        CheckpointError: The folder has a checkpoint of another run, or only damaged ones.
    """
    config, began, check_seconds = components.config, time.perf_counter(), dict[str, float]()
    if config.eval_every and components.held_out is None:
        raise ConfigError("eval_every > 0 needs held-out problems", where="eval_every", fix="set it to 0, or add some")
    if components.held_out is not None:
        require_disjoint(components.prompts, components.held_out.prompts)
    with ExitStack() as stack:
        checkpoints = stack.enter_context(
            closing(Checkpoints(components.folder, components.learner, identity=components.identity))
        )
        prefetcher = stack.enter_context(closing(RolloutPrefetcher()))
        with counted(check_seconds, "canaries"):
            calibrations, samples = calibrate_engines(components)
            for text in (*calibration_messages(calibrations), *_check_rewards(components, samples)):
                recorder.log(text)
        audit = Audit(components, recorder.log)
        run = Run(
            components=components,
            recorder=recorder,
            checkpoints=checkpoints,
            prompt_schedule=schedule_of(components),
            prefetcher=prefetcher,
            audit=audit,
            history=History(components.folder),
            health_monitor=HealthMonitor(components.health),
            calibrations=tuple(calibrations),
            began=began,
            check_seconds=check_seconds,
        )
        state = checkpoints.load_for(config.num_iterations)
        if state is not None:
            run.restore(state)
            recorder.log(f"resume: after iteration {run.iterations_done} of {config.num_iterations}")
            sync_when_idle(run)
        try:
            yield run
        except KeyboardInterrupt:
            _checkpoint_on_interrupt(run)
            raise


def iterate(run: Run) -> None:
    """Run the next iteration. If ranks are lost, resume from the newest checkpoint and repeat.

    Raises:
        RlcoreError: As in :func:`train`. The run must not be continued.
    """
    target, lost = run.iterations_done + 1, None
    while lost or (run.iterations_done < target and run.stop is None):
        try:
            if lost:
                _restart_ranks(run, lost)
                lost = None
            else:
                _iterate(run)
        except LearnerLostError as error:
            lost = error


def _restart_ranks(run: Run, error: LearnerLostError) -> None:
    run.recorder.log(str(error))
    run.prefetcher.drain()
    state = run.checkpoints.load()
    run.restore(state if state is not None else START)
    run.recorder.log(f"resume: after iteration {run.iterations_done} of {run.components.config.num_iterations}")
    sync_when_idle(run)


def _iterate(run: Run) -> None:
    components, iteration, seconds = run.components, run.iterations_done + 1, dict[str, float]()
    began = time.process_time()
    sampled = collect_groups(run, iteration, seconds)
    metrics = _rollout_metrics(run, iteration, sampled)
    with timed(seconds, "update"):
        sleep_engine(components.engine)
        run.pending_audit_state = ""
        metrics |= update_policy(run, sampled, iteration, audit=run.audit)
    if _needs_full_sync(run, iteration):
        with timed(seconds, "rollout"):
            run.prefetcher.drain()
        with timed(seconds, "sync"):
            metrics |= sync_when_idle(run)
    metrics["seconds/processor"] = time.process_time() - began
    if components.held_out and _is_evaluated(run, iteration):
        with timed(seconds, "evaluate"):
            length, log, check = components.config.sampling.max_new_tokens, run.recorder.log, run.audit.check_evaluation
            metrics |= evaluate_held_out(
                components.sampler, components.held_out, max_new_tokens=length, log=log, check=check
            )
    metrics |= _cost_metrics(sampled, seconds) | take_metrics(components.engine)
    _record(run, iteration, metrics, sampled)


def finish(run: Run) -> TrainResult:
    """Return the result of a run. If a health rule stopped it, restore the last healthy iteration first.

    Raises:
        TrainingError: No iteration is healthy, or no checkpoint of a healthy iteration is left.
    """
    last = len(run.history)
    if run.stop:
        last = run.stop.restored_iteration
        restore_last_healthy(run, run.stop)
        run.recorder.stopped(run.stop)
        _replay(run, last)
    return TrainResult(
        history=tuple(run.history[:last]),
        findings=tuple(run.findings),
        stop=run.stop,
        rolled_back_history=tuple(run.history[last:]),
    )


def _replay(run: Run, until: int) -> None:
    """Repeat recorded iterations. Samples and updates are the same, so the weights are too."""
    if run.iterations_done < until:
        start = run.iterations_done
        run.recorder.log(f"restore iteration={until} from_checkpoint={start} (replaying {until - start})")
    sync_when_idle(run)
    for iteration in range(run.iterations_done + 1, until + 1):
        sampled = collect_groups(run, iteration, {})
        sleep_engine(run.components.engine)
        update_policy(run, sampled, iteration)
        run.prefetcher.drain()
        sync_when_idle(run)
        record_group_signals(run, iteration, sampled)
        run.iterations_done = iteration


def _rollout_metrics(run: Run, iteration: int, sampled: SampledGroups[list[ScoredRollout]]) -> dict[str, float]:
    components, config, metrics = run.components, run.components.config, dict[str, float]()
    if config.sampling.zero_signal_keep_prob < 1.0:
        metrics["prompts/skipped"] = float(run.prompt_schedule.num_skipped(iteration))
    if config.sampling.dynamic_sampling_rounds:
        metrics |= replacement_metrics(sampled, truncated=config.update.truncated_completions)
    if len(components.mixture_weights) > 1:
        metrics |= dataset_rewards(sampled.groups, truncated=config.update.truncated_completions)
    if config.sampling.episodes.has_tools:
        metrics |= episode_metrics([item.rollout for group in sampled.groups for item in group])
    metrics |= branch_metrics([item.rollout for group in sampled.groups for item in group])
    if config.sampling.agent:
        metrics |= take_metrics(components.sampler)
    if config.sampling.staleness:
        metrics["staleness"] = mean_staleness(sampled.groups, components.learner.policy_version)
    return metrics


def _needs_full_sync(run: Run, iteration: int) -> bool:
    """Return True if all weights are synced and verified after this iteration, not only loaded between two batches."""
    config = run.components.config
    is_evaluated = run.components.held_out is not None and _is_evaluated(run, iteration)
    return config.sampling.staleness <= 1 or is_evaluated or iteration == config.num_iterations


def _is_evaluated(run: Run, iteration: int) -> bool:
    every, last = run.components.config.eval_every, run.components.config.num_iterations
    return every > 0 and (iteration == last or iteration % every == 0)


def _cost_metrics(sampled: SampledGroups[list[ScoredRollout]], seconds: Mapping[str, float]) -> dict[str, float]:
    episodes = [item.rollout for group in (*sampled.groups, *sampled.replaced) for item in group]
    num_tokens = sum(len(sample.completion_ids) for rollout in episodes for sample in rollout.samples)
    return {
        "rollouts/count": float(len(episodes)),
        "rollouts/tokens": float(num_tokens),
        "tokens_per_second": num_tokens / sum(seconds.values()),
        **{f"seconds/{name}": value for name, value in seconds.items()},
    }


def _record(run: Run, iteration: int, metrics: dict[str, float], sampled: SampledGroups[list[ScoredRollout]]) -> None:
    _require_finite(metrics)
    run.history.append({"iteration": iteration, **metrics})
    record_group_signals(run, iteration, sampled)
    run.iterations_done = iteration
    report, counts = check_run_health(run)
    healthy = tuple(report.last_healthy_by_rule.values())
    cost = {"checks/time_fraction": run.checks_time_fraction}
    run.recorder.metrics(iteration, metrics | counts | run.audit.metrics() | cost)
    run.recorder.rollouts(iteration, sampled)
    if run.stop is None and run.checkpoints.is_due(iteration):
        _checkpoint(run, protected=healthy)
    elif run.stop is None:
        run.pending_audit_state, run.protected_steps = json.dumps(run.audit.state()), healthy


def _checkpoint(run: Run, *, protected: Collection[int]) -> None:
    """Write the state of all components. Health rules have none: they are functions of the history."""
    components = run.components
    with counted(run.check_seconds, "canaries"):
        known_answers_canary(components.reward, components.prompts, prefill=components.tokenizer.prefill)
    run.recorder.flush()  # a resumed run does not record this again
    run.checkpoints.save(run.iterations_done, run_state=run.state(), protected=protected)


def _checkpoint_on_interrupt(run: Run) -> None:
    """Write a checkpoint of the last iteration if it has none and nothing has changed since.

    Not with prefetch, where it would wait for rollouts, nor with a distributed learner, which the signal reaches too.
    """
    if (
        run.pending_audit_state
        and not run.components.config.sampling.staleness
        and isinstance(run.components.learner, LocalLearner)
    ):
        run.recorder.flush()
        state = {**run.state(), "audit": json.loads(run.pending_audit_state)}
        run.checkpoints.save(run.iterations_done, run_state=state, protected=run.protected_steps)


def _check_rewards(components: Components, samples: list[Rollout]) -> list[str]:
    prefill = components.tokenizer.prefill
    notes = terms_canary(components.reward, components.prompts, samples, prefill=prefill)
    if components.held_out:
        known = [*components.prompts, *components.held_out.prompts]
        notes += known_answers_canary(components.held_out.verifier, known, prefill=prefill)
    return list(dict.fromkeys(notes))


def _require_finite(metrics: Mapping[str, float]) -> None:
    bad = [f"{name} = {value}" for name, value in metrics.items() if not math.isfinite(value)]
    if bad:
        raise NonFiniteError(f"metrics are not finite: {', '.join(bad)}", fix="find the first step with such a value")
