"""Events for Prefect automations: a new snapshot, a refused run, a failed stage, a stopped run, a rejected model.

``infra/automations.yaml`` reacts: a snapshot starts a retraining, the others call a webhook. Prefect adds flow run,
deployment and tags to each event. The inline engine has no server and emits none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlcore.errors import ConfigError, RlcoreError
from rlcore.tasks.pipeline.prefect_bridge import emit_event
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.store.artifacts import ArtifactRef
from rlcore.tasks.store.storage import read_json

SNAPSHOT = "rlcore.snapshot.made"
NOT_STARTED, FAILED, STOPPED = "rlcore.run.refused", "rlcore.stage.failed", "rlcore.run.stopped"
REFUSED = "rlcore.promotion.refused"
BUDGET, MISSED = "rlcore.budget.reached", "rlcore.schedule.missed"


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
        emit_event(FAILED, {**_resource(preset, stage), **labels}, f"{type(error).__name__}: {error}")
        raise


def emit_health_stop(preset: str, stage: str, folder: Path) -> None:
    """Emit an event if the artifact's ``health.json`` records a stop by a health rule."""
    path = folder / "health.json"
    stopped = read_json(path)["stopped"] if path.is_file() else None
    if stopped is not None:
        emit_event(STOPPED, _resource(preset, stage), stopped["text"])


def emit_budget_reached(preset: str, stage: str, text: str) -> None:
    """Emit an event for a run that a limit of its budget stopped."""
    emit_event(BUDGET, _resource(preset, stage), text)


def emit_rejection(model: str, version: int, text: str) -> None:
    """Emit an event for a version that the promotion gate has rejected."""
    name = f"{model} version {version}"
    emit_event(REFUSED, {"prefect.resource.id": f"rlcore.model.{model}.{version}", "prefect.resource.name": name}, text)


def _resource(preset: str, stage: str) -> dict[str, str]:
    return {"prefect.resource.id": f"rlcore.stage.{preset}.{stage}", **_named(preset, stage)}


def _named(preset: str, stage: str) -> dict[str, str]:
    return {"prefect.resource.name": f"{stage} of {preset}", "rlcore.preset": preset, "rlcore.stage": stage}
