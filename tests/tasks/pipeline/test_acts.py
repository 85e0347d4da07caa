"""Actors of acts on a registered model."""

from __future__ import annotations

import getpass

import pytest

from rlcore.tasks.pipeline import acts
from rlcore.tasks.pipeline.acts import current_actor
from rlcore.tasks.pipeline.prefect_bridge import FlowRun


def test_an_actor_is_the_user_and_the_flow_run_with_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(current_actor()) == {"user", "host"}
    assert current_actor()["user"] == getpass.getuser()
    monkeypatch.setenv("PREFECT__WORKER_NAME", "gpu-1")
    assert "worker" not in current_actor()
    run = FlowRun(flow_run_id="123", name="promote tiny", attempt=1, url="")
    monkeypatch.setattr(acts, "current_flow_run", lambda: run)
    found = current_actor()
    assert (found["flow_run"], found["flow_run_id"], found["worker"]) == ("promote tiny", "123", "gpu-1")
