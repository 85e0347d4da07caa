"""Actor of acts on registered models."""

from __future__ import annotations

import os

from rlcore.tasks.pipeline.prefect_bridge import current_flow_run
from rlcore.tasks.store.audit_log import local_actor

_WORKER = "PREFECT__WORKER_NAME"  # set by Prefect's worker for its runs


def current_actor() -> dict[str, str]:
    """Return who acts, for the audit log: user and host, with the flow run and its worker if there are some."""
    run, worker = current_flow_run(), os.environ.get(_WORKER, "")
    return (
        local_actor()
        | ({"flow_run": run.name, "flow_run_id": run.flow_run_id} if run else {})
        | ({"worker": worker} if run and worker else {})
    )
