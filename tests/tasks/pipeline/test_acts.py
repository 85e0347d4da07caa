"""Actors of acts on a registered model, and the events of acts."""

from __future__ import annotations

import getpass
from pathlib import Path

import pytest

from rlcore.tasks.pipeline import acts
from rlcore.tasks.pipeline.acts import announce, current_actor
from rlcore.tasks.pipeline.prefect_bridge import FlowRun
from rlcore.tasks.store.settings import Home
from rlcore.tasks.tracking.champion import Grounds, promote
from rlcore.tasks.tracking.registry import read_tags
from rlcore.tasks.tracking.runs import open_tracker
from tests.registered import ANNA, register_versions


def test_an_actor_is_the_user_and_the_flow_run_with_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(current_actor()) == {"user", "host"}
    assert current_actor()["user"] == getpass.getuser()
    monkeypatch.setenv("PREFECT__WORKER_NAME", "gpu-1")
    assert "worker" not in current_actor()
    run = FlowRun(flow_run_id="123", name="promote tiny", attempt=1, url="")
    monkeypatch.setattr(acts, "current_flow_run", lambda: run)
    found = current_actor()
    assert (found["flow_run"], found["flow_run_id"], found["worker"]) == ("promote tiny", "123", "gpu-1")


def test_an_act_is_announced_until_it_is_noted_at_its_version(
    tracked_home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker, told = open_tracker(tracked_home), list[str]()
    version = register_versions(tracker, tmp_path / "model", "m")[0]
    grounds = Grounds(over=None, verdict="v", sentence="Promoted.")
    entry = promote(tracked_home, tracker, version, grounds, actor=ANNA)
    assert entry is not None
    with pytest.MonkeyPatch.context() as killed, pytest.raises(KeyboardInterrupt):
        killed.setattr(acts, "emit_act", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        announce(tracker, version, entry, "e", "text")
    monkeypatch.setattr(
        acts, "emit_act", lambda event, model, number, text: told.append(f"{event} {model} {number} {text}")
    )
    for _ in range(2):
        announce(tracker, version, entry, "e", "text")
    announce(tracker, version, None, "e", "nothing was done")
    assert told == ["e m 1 text"]
    assert read_tags(tracker, version)["audit.1"] == entry.digest
