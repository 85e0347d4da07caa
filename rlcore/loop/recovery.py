"""Health checks of a run: record findings, and restore the last healthy checkpoint after a stop."""

from __future__ import annotations

from rlcore.checks.health import HealthReport
from rlcore.errors import TrainingError
from rlcore.loop.recorder import HealthStop
from rlcore.loop.run import Run, to_record, unreported


def check_run_health(run: Run) -> tuple[HealthReport, dict[str, float]]:
    """Return the health report after the newest iteration, and the number of findings as ``health/...``.

    New findings are recorded and logged. A rule without patience left stops the run, unless the configuration only
    warns.
    """
    config = run.components.health
    report = run.health_monitor.update(run.history)
    for finding in unreported(report, run.findings):
        run.findings.append(to_record(finding, run.iterations_done))
        run.recorder.log(f"health {finding.level}: {finding}\n  fix: {finding.fix}")
    if report.stop and config.action == "stop":
        run.stop = HealthStop(
            finding=report.stop, iteration=run.iterations_done, restored_iteration=report.last_healthy
        )
    warnings = sum(finding.level == "warn" for finding in report.findings)
    return report, {
        "health/warnings": float(warnings),
        "health/alarms": float(len(report.findings) - warnings),
    }


def restore_last_healthy(run: Run, stop: HealthStop) -> None:
    """Restore the newest checkpoint up to the last healthy iteration. The history keeps all iterations.

    Raises:
        TrainingError: No such checkpoint exists, because the run was unhealthy from the start.
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
    run.prompt_schedule.restore(state["prompt_schedule"])
    run.prefetcher.restore(state["prefetched"], run.iterations_done + 1, run.prompt_schedule.prompts_for)
