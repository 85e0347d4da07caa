"""Flow: take a champion down."""

from __future__ import annotations

from prefect import flow

from flows.run import run_roll_back


@flow(name="rollback", flow_run_name="rollback {model} {version}", persist_result=False)
def rollback(model: str, version: int, reason: str) -> str:
    """The previous champion of ``model`` is champion again; ``version`` must be the present one."""
    return run_roll_back(model, version, reason)
