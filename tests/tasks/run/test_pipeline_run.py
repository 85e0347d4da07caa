"""A command that was killed goes on with its run in MLflow; other commands have runs of their own."""

from __future__ import annotations

from typing import Any

import pytest

from rlcore.tasks.run.leases import LEASE_TAG
from rlcore.tasks.run.pipeline import open_pipeline, open_pipeline_run
from rlcore.tasks.store.settings import Home
from rlcore.tasks.tracking.runs import RunTracker, Tracker, open_tracker
from tests.tasks.run.test_pipeline import config


@pytest.fixture
def tracker(tracked_home: Home) -> Tracker:
    return open_tracker(tracked_home)


def open_one(tracker: Tracker, *targets: str, **changed: Any) -> RunTracker:
    return open_pipeline_run(tracker, "toy", config(**changed), targets, lease="now")


def test_after_a_kill_the_same_values_and_targets_go_on_with_the_same_run_and_no_others(tracker: Tracker) -> None:
    first = open_one(tracker, "rl")
    first.end("KILLED")
    assert open_one(tracker, "sft").run_id != first.run_id
    assert open_one(tracker, "rl", seed=1).run_id != first.run_id
    again = open_one(tracker, "rl")
    assert (again.run_id, again.began) == (first.run_id, first.began)
    stored = tracker.client.get_run(first.run_id)
    assert stored.info.status == "RUNNING"
    assert stored.data.tags["restarts"] == "1"
    assert stored.data.tags[LEASE_TAG] == "now"
    for ended_by_itself in ("FINISHED", "FAILED"):
        other = open_one(tracker, "rl")
        assert other.run_id != again.run_id  # that one is alive, or ended by itself
        again = other
        again.end(ended_by_itself)
    assert open_one(tracker, "rl").run_id != again.run_id


def test_the_lease_is_there_before_the_run_and_gone_after_it(tracked_home: Home, tracker: Tracker) -> None:
    with open_pipeline(tracked_home, tracker, "toy", config(), ["rl"]) as parent:
        (lease,) = tracked_home.leases.glob("*.json")
        assert tracker.client.get_run(parent.run_id).data.tags[LEASE_TAG] == lease.stem
    assert list(tracked_home.leases.iterdir()) == []
    assert tracker.client.get_run(parent.run_id).info.status == "FINISHED"
