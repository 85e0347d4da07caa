"""Applies the health rules to a run: findings are noted, and a stopped run goes back to where it was sound."""

from __future__ import annotations

from rlcore.checks.health import Verdict
from rlcore.errors import TrainingError
from rlcore.loop.recorder import Stop
from rlcore.loop.run import Run, new_findings, noted


def judge_run(run: Run) -> tuple[Verdict, dict[str, float]]:
    """The verdict after the newest iteration, and the number of findings as ``health/...``.

    A rule that has just crossed a bound is noted and kept. A rule whose patience is used up stops the run, if the
    configuration lets it.
    """
    config = run.parts.health
    verdict = run.judge.verdict(run.history)
    for finding in new_findings(verdict, run.findings):
        run.findings.append(noted(finding, run.done))
        run.recorder.note(f"health {finding.level}: {finding}\n  fix: {finding.fix}")
    if verdict.stop and config.action == "stop":
        run.stop = Stop(finding=verdict.stop, iteration=run.done, sound=verdict.sound)
    warnings = sum(finding.level == "warn" for finding in verdict.findings)
    return verdict, {
        "health/warnings": float(warnings),
        "health/alarms": float(len(verdict.findings) - warnings),
    }


def go_back(run: Run, stop: Stop) -> None:
    """Restore the newest checkpoint of the stop's sound iteration, or of an earlier one. The history stays whole.

    Raises:
        TrainingError: there is no such checkpoint, because the run was unhealthy from the start.
    """
    run.ahead.wait()
    state = run.checkpoints.load(up_to=stop.sound)
    if state is None:
        raise TrainingError(
            f"the run was stopped by a health rule after iteration {stop.iteration}, and no checkpoint is from before"
            f" that: {stop.finding}",
            where=f"health.{stop.finding.rule}",
            fix=stop.finding.fix,
        )
    run.done = int(state["iteration"])
    run.turns.restore(state["turns"])
    run.ahead.restore(state["ahead"], run.done + 1, run.turns.prompts_of)
