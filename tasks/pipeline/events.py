"""Events for Prefect automations: new snapshots, refused and stopped runs, drift, and each act on a champion.

``infra/automations.yaml`` reacts: preferences start a retraining, the others go to a webhook, Slack and mail. Prefect
adds flow run, deployment and tags to each event. The inline engine has no server: there an event is a line in the log,
and an act is the line of its command.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlcore.errors import ConfigError, RlcoreError
from rlcore.tasks.pipeline.prefect_bridge import current_flow_run, emit_event
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.store.artifacts import ArtifactRef
from rlcore.tasks.store.storage import read_json

SNAPSHOT = "rlcore.snapshot.made"
NOT_STARTED, FAILED, STOPPED = "rlcore.run.refused", "rlcore.stage.failed", "rlcore.health.stopped"
AWAITS, PROMOTED = "rlcore.promotion.awaits", "rlcore.promotion.promoted"
REFUSED, ROLLED_BACK = "rlcore.promotion.refused", "rlcore.promotion.rolled_back"
DRIFT = "rlcore.drift"
BUDGET, MISSED = "rlcore.budget.reached", "rlcore.schedule.missed"
_FAILURES = {"drift": DRIFT}  # events of stages whose failure is a finding about the data


def emit_snapshot(config: RunConfig, stage: str, ref: ArtifactRef) -> None:
    """Emit an event for a dataset snapshot that is new to this state directory."""
    labels = {
        "rlcore.contract": ref.contract.partition("/")[0],
        "rlcore.retrain": "yes" if config.retrain else "no",
    }  # true if the preset can be retrained
    emit_event(
        SNAPSHOT,
        {"prefect.resource.id": f"rlcore.dataset.{ref.sha256}", **_named(config.name, stage), **labels},
        f"{ref.rows:,} rows for training and held out ({ref.contract})",
    )


def emit_missed(run: str, deployment: str, text: str) -> None:
    """Emit an event, from a worker, for a scheduled run that did not start before the next one was due."""
    from prefect import events

    labels = {"prefect.resource.id": f"rlcore.schedule.{deployment}", "prefect.resource.name": deployment}
    events.emit_event(MISSED, labels, payload={"text": text, "run": run, "url": ""})


@contextmanager
def emit_on_refusal(preset: str) -> Iterator[None]:
    """Emit an event if the checks before a run refuse it: a scheduled run may find broken rows, or a file missing."""
    try:
        yield
    except RlcoreError as error:
        name = Path(preset).stem
        labels = {"prefect.resource.id": f"rlcore.run.{name}", "prefect.resource.name": name, "rlcore.preset": name}
        emit_event(NOT_STARTED, labels, f"{type(error).__name__}: {error}")
        raise


@contextmanager
def emit_on_failure(preset: str, stage: str) -> Iterator[None]:
    """Emit an event if an rlcore error ends a stage (gate, canary, grader). A wrong preset emits none."""
    try:
        yield
    except ConfigError:
        raise
    except RlcoreError as error:
        labels = {"rlcore.error": type(error).__name__}
        event = _FAILURES.get(stage, FAILED)
        emit_event(event, {**_resource(preset, stage), **labels}, f"{type(error).__name__}: {error}")
        raise


def emit_findings(preset: str, stage: str, folder: Path) -> None:
    """Emit the events of a finished artifact: a stop by a health rule, columns whose drift is a warning."""
    health, drift = folder / "health.json", folder / "drift.json"
    stopped = read_json(health)["stopped"] if health.is_file() else None
    if stopped is not None:
        emit_event(STOPPED, _resource(preset, stage), stopped["text"])
    found = read_json(drift) if drift.is_file() else []
    moved = [f"{each['name']}: {one['column']}" for each in found for one in each["columns"] if one["level"] != "calm"]
    if moved:
        emit_event(DRIFT, _resource(preset, stage), f"accepted, but these columns have moved: {', '.join(moved)}")


def emit_budget_reached(preset: str, stage: str, text: str) -> None:
    """Emit an event for a run that a limit of its budget stopped."""
    emit_event(BUDGET, _resource(preset, stage), text)


def emit_act(event: str, model: str, version: int, text: str) -> None:
    """Emit an event for an act on a registered version: it awaits an approval, is promoted, refused, or rolled back.

    Without a flow run the command's own line has the outcome.
    """
    if current_flow_run():
        labels = {
            "prefect.resource.id": f"rlcore.model.{model}.{version}",
            "prefect.resource.name": f"{model} version {version}",
        }
        emit_event(event, labels, text)


def _resource(preset: str, stage: str) -> dict[str, str]:
    return {"prefect.resource.id": f"rlcore.stage.{preset}.{stage}", **_named(preset, stage)}


def _named(preset: str, stage: str) -> dict[str, str]:
    return {"prefect.resource.name": f"{stage} of {preset}", "rlcore.preset": preset, "rlcore.stage": stage}
