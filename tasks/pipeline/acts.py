"""Acts on registered models: who does them, and their events."""

from __future__ import annotations

import os

from rlcore.tasks.pipeline.events import emit_act
from rlcore.tasks.pipeline.prefect_bridge import current_flow_run
from rlcore.tasks.store.audit_log import AuditEntry, local_actor
from rlcore.tasks.tracking.champion import is_mirrored, mirror
from rlcore.tasks.tracking.registry import ModelVersion
from rlcore.tasks.tracking.runs import Tracker

_WORKER = "PREFECT__WORKER_NAME"  # set by Prefect's worker for its runs


def current_actor() -> dict[str, str]:
    """Return who acts, for the audit log: user and host, with the flow run and its worker if there are some."""
    run, worker = current_flow_run(), os.environ.get(_WORKER, "")
    return (
        local_actor()
        | ({"flow_run": run.name, "flow_run_id": run.flow_run_id} if run else {})
        | ({"worker": worker} if run and worker else {})
    )


def announce(tracker: Tracker, version: ModelVersion, entry: AuditEntry | None, event: str, text: str) -> None:
    """Emit the event of an act and complete it; nothing happens if it was completed before."""
    if entry is not None and not is_mirrored(tracker, version, entry):
        emit_act(event, version.name, version.version, text)
        mirror(tracker, version, entry)
