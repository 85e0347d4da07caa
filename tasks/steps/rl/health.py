"""The health rules at work in an online-RL run: what they say is shown and logged, and a stopped run goes back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rlcore.errors import TrainingError
from rlcore.health import Finding, Verdict, judge
from rlcore.metrics import check_names
from tasks.home.storage import write_json
from tasks.steps.rl.run import RlRun


def watch(run: RlRun, iteration: int) -> Verdict:
    """Judge the run after an iteration; a rule that is newly beyond a bound is shown, and kept for the artifact."""
    config = run.context.config.health
    verdict = judge(run.history, config)
    counts = {
        "health/warnings": float(sum(finding.level == "warn" for finding in verdict.findings)),
        "health/alarms": float(sum(finding.level != "warn" for finding in verdict.findings)),
    }
    check_names(counts)
    run.context.tracker.log_metrics(counts, step=iteration)
    for finding in verdict.findings:
        if not any(_same(finding, known) for known in run.findings):
            run.findings.append({"iteration": iteration, **asdict(finding)})
            run.context.progress(f"health {finding.level}: {finding}\n  fix: {finding.fix}")
    return verdict


def stopping(run: RlRun, verdict: Verdict) -> Finding | None:
    """What ends the run here: a rule whose patience is used up, where the configuration lets it stop a run."""
    return verdict.stop if run.context.config.health.action == "stop" else None


def go_back(run: RlRun, finding: Finding, *, sound: int) -> int:
    """Restore the newest checkpoint of iteration ``sound`` or an earlier one, and give that checkpoint's iteration.

    ``sound`` is the run's result, whatever was checkpointed; what came later is set aside.

    Raises:
        TrainingError: there is none: the run was unhealthy from the start.
    """
    stopped_at = int(run.history[-1]["iteration"])
    state = run.checkpoints.load(run.learner, up_to=sound)
    if state is None:
        raise TrainingError(
            f"the run was stopped by a health rule after iteration {stopped_at}, and no checkpoint is from before that:"
            f" {finding}",
            where=f"health.{finding.rule}",
            fix=finding.fix,
        )
    restored = int(state["iteration"])
    run.ahead.restore(state["ahead"], run.prompts_of(restored + 1))
    text = f"stopped after iteration {stopped_at} by {finding}; the result is iteration {sound}. {finding.fix}"
    run.stopped = {
        "text": text,
        "iteration": stopped_at,
        "rule": finding.rule,
        "result_iteration": sound,
        "dropped": run.history[sound:],
    }
    run.history = run.history[:sound]
    run.context.tracker.set_tags({"health": f"stopped by {finding.rule} after iteration {stopped_at}"})
    run.context.progress(text)
    return restored


def write_health(run: RlRun) -> None:
    """``health.json`` of the artifact: every finding, and where the run was stopped if it was."""
    write_json({"findings": run.findings, "stopped": run.stopped}, run.context.folder / "health.json")


def _same(finding: Finding, known: Mapping[str, Any]) -> bool:
    return all(known[name] == getattr(finding, name) for name in ("rule", "level", "since"))
