"""The RL iteration (draw, score, learn, sync, evaluate, record, judge, checkpoint), and a run of iterations."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager

from rlcore.checks.audit.audit import Audit
from rlcore.checks.canaries import known_answers_canary, terms_canary
from rlcore.checks.health import HealthMonitor
from rlcore.errors import ConfigError, LearnerLostError, NonFiniteError
from rlcore.loop.checkpoints import Checkpoints
from rlcore.loop.history import History
from rlcore.loop.prefetch import RolloutPrefetcher, mean_staleness
from rlcore.loop.prompt_schedule import SampledGroups
from rlcore.loop.recorder import LogRecorder, Recorder
from rlcore.loop.recovery import check_run_health, restore_last_healthy
from rlcore.loop.rollouts import (
    collect_groups,
    dataset_rewards,
    episode_metrics,
    evaluate_held_out,
    record_group_signals,
    replacement_metrics,
)
from rlcore.loop.run import START, Components, Run, TrainResult, timed
from rlcore.loop.update import update_policy
from rlcore.loop.weight_sync import calibrate_engines, calibration_messages, sync_when_idle
from rlcore.sampling.base import sleep_engine, take_metrics
from rlcore.training.local_learner import LocalLearner
from rlcore.types import Rollout, ScoredRollout


def train(parts: Components, recorder: Recorder | None = None) -> TrainResult:
    """The outcome of a run, whose trained policy the learner then holds. It resumes from its newest checkpoint.

    Without a ``recorder`` the run writes to a log (:class:`rlcore.loop.recorder.LogRecorder`).

    Raises:
        RlcoreError: a part fails, a canary finds a part that is silently broken, or a health rule ends the run and no
            iteration was sound. Checkpoints stay: with new parts, the same call resumes from the newest one.
    """
    with open_run(parts, recorder or LogRecorder(parts.config.num_iterations)) as run:
        while not run.is_over:
            iterate(run)
        return finish(run)


@contextmanager
def open_run(parts: Components, recorder: Recorder) -> Iterator[Run]:
    """A run whose engines and rewards are proved sound. If it has a checkpoint, it resumes from the newest one.

    On the way out the engine is idle, and the last checkpoint is on the disk. When the run is interrupted between two
    updates, that is one of its last iteration.

    Raises:
        ConfigError: the run is to be evaluated, but has no held-out problems.
        StaleSamplerError, CanaryError: an engine or a reward is broken.
        CheckpointError: the folder has a checkpoint of another run, or only damaged ones.
    """
    config = parts.config
    if config.eval_every and parts.held_out is None:
        raise ConfigError("eval_every > 0 needs held-out problems", where="eval_every", fix="set it to 0, or give some")
    with ExitStack() as stack:
        checkpoints = stack.enter_context(closing(Checkpoints(parts.folder, parts.learner, identity=parts.identity)))
        ahead = stack.enter_context(closing(RolloutPrefetcher()))
        baselines, samples = calibrate_engines(parts)
        for text in calibration_messages(baselines):
            recorder.log(text)
        for text in _check_rewards(parts, samples):
            recorder.log(text)
        audit = Audit(parts, recorder.log)
        run = Run(
            components=parts,
            recorder=recorder,
            checkpoints=checkpoints,
            prompt_schedule=parts.prompt_schedule(),
            prefetcher=ahead,
            audit=audit,
            history=History(parts.folder),
            health_monitor=HealthMonitor(parts.health),
            calibrations=tuple(baselines),
        )
        state = checkpoints.load()
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
    """Do the next iteration. If ranks are lost in it, resume from the newest checkpoint and do it again.

    Raises:
        RlcoreError: as :func:`train`. The run must not be continued then.
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
    """Resume from the newest checkpoint, or from the start, with new ranks in place of the lost ones."""
    run.recorder.log(str(error))
    run.prefetcher.drain()
    state = run.checkpoints.load()
    run.restore(state if state is not None else START)
    run.recorder.log(f"resume: after iteration {run.iterations_done} of {run.components.config.num_iterations}")
    sync_when_idle(run)


def _iterate(run: Run) -> None:
    parts, iteration, seconds = run.components, run.iterations_done + 1, dict[str, float]()
    drawn = collect_groups(run, iteration, seconds)
    metrics = _rollout_metrics(run, iteration, drawn)
    with timed(seconds, "update"):
        sleep_engine(parts.engine)
        run.pending_audit_state = ""
        metrics |= update_policy(run, drawn, iteration, audit=run.audit)
    if _needs_full_sync(run, iteration):
        with timed(seconds, "rollout"):
            run.prefetcher.drain()
        with timed(seconds, "sync"):
            metrics |= sync_when_idle(run)
    if parts.held_out and _is_evaluated(run, iteration):
        with timed(seconds, "evaluate"):
            length = parts.config.sampling.max_new_tokens
            metrics |= evaluate_held_out(parts.sampler, parts.held_out, max_new_tokens=length, log=run.recorder.log)
    metrics |= _cost_metrics(drawn, seconds) | take_metrics(parts.engine)
    _record(run, iteration, metrics, drawn)


def finish(run: Run) -> TrainResult:
    """The outcome of a run. If a health rule ended it, learner and engine first go back to the newest sound iteration.

    Raises:
        TrainingError: no iteration is sound, or no checkpoint is left from before the first unsound iteration.
    """
    sound = len(run.history)
    if run.stop:
        sound = run.stop.restored_iteration
        restore_last_healthy(run, run.stop)
        run.recorder.stopped(run.stop)
        _replay(run, sound)
    history, dropped = run.history[:sound], run.history[sound:]
    return TrainResult(
        history=tuple(history), findings=tuple(run.findings), stop=run.stop, rolled_back_history=tuple(dropped)
    )


def _replay(run: Run, until: int) -> None:
    """Repeat iterations that are recorded already. Draws and updates are the same, so the weights are too."""
    if run.iterations_done < until:
        start = run.iterations_done
        run.recorder.log(f"restore iteration={until} from_checkpoint={start} (replaying {until - start})")
    sync_when_idle(run)
    for iteration in range(run.iterations_done + 1, until + 1):
        drawn = collect_groups(run, iteration, {})
        sleep_engine(run.components.engine)
        update_policy(run, drawn, iteration)
        run.prefetcher.drain()
        sync_when_idle(run)
        record_group_signals(run, iteration, drawn)
        run.iterations_done = iteration


def _rollout_metrics(run: Run, iteration: int, drawn: SampledGroups[list[ScoredRollout]]) -> dict[str, float]:
    """The metrics of the rollouts before the update that the configuration asks for."""
    parts, config, metrics = run.components, run.components.config, dict[str, float]()
    if config.sampling.zero_signal_keep_prob < 1.0:
        metrics["prompts/skipped"] = float(run.prompt_schedule.num_skipped(iteration))
    if config.sampling.dynamic_sampling_rounds:
        metrics |= replacement_metrics(drawn, truncated=config.update.truncated_completions)
    if len(parts.mixture_weights) > 1:
        metrics |= dataset_rewards(drawn.groups, truncated=config.update.truncated_completions)
    if config.sampling.episodes.has_tools:
        metrics |= episode_metrics([item.rollout for group in drawn.groups for item in group])
    if config.sampling.staleness:
        metrics["staleness"] = mean_staleness(drawn.groups, parts.learner.policy_version)
    return metrics


def _needs_full_sync(run: Run, iteration: int) -> bool:
    """Whether learner and engine meet after this iteration, for a sync with all of its proofs.

    An engine that samples several iterations ahead takes copies of the weights between two batches otherwise.
    """
    config = run.components.config
    is_asked = run.components.held_out is not None and _is_evaluated(run, iteration)
    return config.sampling.staleness <= 1 or is_asked or iteration == config.num_iterations


def _is_evaluated(run: Run, iteration: int) -> bool:
    every, last = run.components.config.eval_every, run.components.config.num_iterations
    return every > 0 and (iteration == last or iteration % every == 0)


def _cost_metrics(drawn: SampledGroups[list[ScoredRollout]], seconds: Mapping[str, float]) -> dict[str, float]:
    """The number of rollouts and tokens, and the wall seconds of the iteration's steps."""
    lengths = [len(item.rollout.completion_ids) for group in (*drawn.groups, *drawn.replaced) for item in group]
    return {
        "rollouts/count": float(len(lengths)),
        "rollouts/tokens": float(sum(lengths)),
        "tokens_per_second": sum(lengths) / sum(seconds.values()),
        **{f"seconds/{name}": value for name, value in seconds.items()},
    }


def _record(run: Run, iteration: int, metrics: dict[str, float], drawn: SampledGroups[list[ScoredRollout]]) -> None:
    """Record an iteration's metrics, let the health rules judge it, and write a checkpoint if one is due."""
    _require_finite(metrics)
    run.history.append({"iteration": iteration, **metrics})
    record_group_signals(run, iteration, drawn)
    run.iterations_done = iteration
    verdict, counts = check_run_health(run)
    run.recorder.metrics(iteration, metrics | counts | run.audit.metrics())
    run.recorder.rollouts(iteration, drawn)
    if run.stop is None and run.checkpoints.is_due(iteration):
        _checkpoint(run, spared=verdict.last_healthy_by_rule.values())
    elif run.stop is None:
        run.pending_audit_state, run.protected_steps = (
            json.dumps(run.audit.state()),
            tuple(verdict.last_healthy_by_rule.values()),
        )


def _checkpoint(run: Run, *, spared: Collection[int]) -> None:
    """Write everything that has state. The health rules have none: they are a function of the history."""
    parts = run.components
    known_answers_canary(parts.reward, parts.prompts, prefill=parts.tokenizer.prefill)
    run.recorder.flush()  # a resumed run does not record this again
    run.checkpoints.save(run.iterations_done, run_state=run.state(), spared=spared)


def _checkpoint_on_interrupt(run: Run) -> None:
    """Write a checkpoint of the last iteration, if there is none and nothing has changed since.

    Not where rollouts are sampled ahead, which takes longer than a user waits; nor where the learner is in processes
    of its own, which the same signal reaches.
    """
    if (
        run.pending_audit_state
        and not run.components.config.sampling.staleness
        and isinstance(run.components.learner, LocalLearner)
    ):
        run.recorder.flush()
        state = {**run.state(), "audit": json.loads(run.pending_audit_state)}
        run.checkpoints.save(run.iterations_done, run_state=state, spared=run.protected_steps)


def _check_rewards(parts: Components, samples: list[Rollout]) -> list[str]:
    """Probe each term of the training reward and the verifier of held-out answers; notes on what cannot be probed."""
    prefill = parts.tokenizer.prefill
    notes = terms_canary(parts.reward, parts.prompts, samples, prefill=prefill)
    if parts.held_out:
        known = [*parts.prompts, *parts.held_out.prompts]
        notes += known_answers_canary(parts.held_out.verifier, known, prefill=prefill)
    return list(dict.fromkeys(notes))


def _require_finite(metrics: Mapping[str, float]) -> None:
    bad = [f"{name} = {value}" for name, value in metrics.items() if not math.isfinite(value)]
    if bad:
        raise NonFiniteError(f"metrics that are not finite: {', '.join(bad)}", fix="find the first step that shows it")
