"""Events: new snapshots, stopped runs, drift, and each act on a champion.

A new snapshot goes to the Prefect server, where ``infra/automations.yaml`` starts a retraining. The others reach the
team through the outbox, as do failed, crashed and missed runs (:mod:`rlcore.tasks.run.reconciliation`). Without
a server an event is a line in the log, and an act is the line of its command.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.run.outbox import put
from rlcore.tasks.run.prefect_bridge import current_flow_run, emit_event
from rlcore.tasks.store.artifacts import ArtifactRef
from rlcore.tasks.store.audit_log import AuditEntry
from rlcore.tasks.store.settings import Home, find_home
from rlcore.tasks.store.storage import read_json

SNAPSHOT = "rlcore.snapshot.made"
STOPPED, DRIFT = "rlcore.health.stopped", "rlcore.drift"
AWAITS, PROMOTED = "rlcore.promotion.awaits", "rlcore.promotion.promoted"
REFUSED, ROLLED_BACK = "rlcore.promotion.refused", "rlcore.promotion.rolled_back"


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


def emit_findings(preset: str, stage: str, folder: Path) -> None:
    """Emit the events of a finished artifact: a stop by a health rule, columns whose drift is a warning."""
    health, drift = folder / "health.json", folder / "drift.json"
    stopped = read_json(health)["stopped"] if health.is_file() else None
    if stopped is not None:
        _emit(STOPPED, preset, stage, stopped["text"])
    found = read_json(drift) if drift.is_file() else []
    moved = [f"{each['name']}: {one['column']}" for each in found for one in each["columns"] if one["level"] != "calm"]
    if moved:
        _emit(DRIFT, preset, stage, f"accepted, but these columns have moved: {', '.join(moved)}")


def tell_act(home: Home, event: str, entry: AuditEntry, text: str) -> None:
    """Tell the team of an act on a registered version, once however often its command is repeated."""
    _tell(home, event, entry.subject, text, key=f"{entry.number}-{entry.digest[:12]}", time=entry.time)


def _emit(event: str, preset: str, stage: str, text: str) -> None:
    labels = {"prefect.resource.id": f"rlcore.stage.{preset}.{stage}", **_named(preset, stage)}
    emit_event(event, labels, text)
    time = datetime.now(UTC).isoformat()
    _tell(find_home(), event, labels["prefect.resource.name"], text, key=uuid4().hex[:12], time=time)


def _tell(home: Home, event: str, about: str, text: str, *, key: str, time: str) -> None:
    """Put a message into the outbox, if there is a server whose worker delivers it."""
    if os.environ.get("PREFECT_API_URL"):
        run = current_flow_run()
        name, url = (run.name, run.url) if run else ("", "")
        put(home, key=key, event=event, about=about, text=text, run=name, url=url, time=time)


def _named(preset: str, stage: str) -> dict[str, str]:
    return {"prefect.resource.name": f"{stage} of {preset}", "rlcore.preset": preset, "rlcore.stage": stage}
