"""Applies the health rules to a run: findings are noted, and a stopped run goes back to where it was sound."""

from __future__ import annotations

from rlcore.checks.health import HealthReport
from rlcore.errors import TrainingError
from rlcore.loop.recorder import HealthStop
from rlcore.loop.run import Run, to_record, unreported


def check_run_health(run: Run) -> tuple[HealthReport, dict[str, float]]:
    """The verdict after the newest iteration, and the number of findings as ``health/...``.

    A rule that has just crossed a bound is noted and kept. A rule whose patience is used up stops the run, if the
    configuration lets it.
    """
    config = run.components.health
    verdict = run.health_monitor.update(run.history)
    for finding in unreported(verdict, run.findings):
        run.findings.append(to_record(finding, run.iterations_done))
        run.recorder.log(f"health {finding.level}: {finding}\n  fix: {finding.fix}")
    if verdict.stop and config.action == "stop":
        run.stop = HealthStop(
            finding=verdict.stop, iteration=run.iterations_done, restored_iteration=verdict.last_healthy
        )
    warnings = sum(finding.level == "warn" for finding in verdict.findings)
    return verdict, {
        "health/warnings": float(warnings),
        "health/alarms": float(len(verdict.findings) - warnings),
    }


def restore_last_healthy(run: Run, stop: HealthStop) -> None:
    """Restore the newest checkpoint of the stop's sound iteration, or of an earlier one. The history stays whole.

    Raises:
        TrainingError: there is no such checkpoint, because the run was unhealthy from the start.
    """
    run.prefetcher.drain()
    state = run.checkpoints.load(up_to=stop.restored_iteration)
    if state is None:
        raise TrainingError(
            f"health rule {stop.finding.rule} stopped the run at iteration {stop.iteration}, "
            f"and no healthy checkpoint exists: {stop.finding}",
            where=f"health.{stop.finding.rule}",
            fix=stop.finding.fix,
        )
    run.iterations_done = int(state["iteration"])
    run.prompt_schedule.restore(state["turns"])
    run.prefetcher.restore(state["ahead"], run.iterations_done + 1, run.prompt_schedule.prompts_for)
