"""Traces: listed in their order, found by their tags, and linked to their run."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import pytest
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

from tasks.home.settings import Home
from tasks.tracking.runs import open_tracker
from tasks.tracking.traces import Trace, log_traces


def test_traces_are_listed_in_their_order_with_their_tags_and_belong_to_their_run(tracked_home: Home) -> None:
    tracker = open_tracker(tracked_home)
    with tracker.start_run("traced", "grpo", tags={}) as run, tracker.start_run("traced", "other", tags={}) as other:
        traces = [
            Trace(inputs={"prompt": f"{n}+1"}, outputs={"completion": f"#### {n + 1}"}, tags={"kind": kind})
            for n, kind in enumerate(("best", "worst", "middle"))
        ]
        log_traces(tracker, run.run_id, traces)
        log_traces(tracker, other.run_id, [])
        places = [run.experiment_id]
        found = tracker.client.search_traces(locations=places, run_id=run.run_id)
        assert [trace.info.tags["kind"] for trace in found] == ["best", "worst", "middle"]
        (span,) = found[1].data.spans
        assert (span.inputs, span.outputs) == ({"prompt": "1+1"}, {"completion": "#### 2"})
        assert len(tracker.client.search_traces(locations=places, filter_string="tags.kind = 'best'")) == 1
        assert len(tracker.client.search_traces(locations=places, run_id=other.run_id)) == 0


def test_traces_that_a_killed_call_has_stored_already_are_not_stored_again(tracked_home: Home) -> None:
    tracker = open_tracker(tracked_home)
    with tracker.start_run("traced", "grpo", tags={}) as run:
        traces = [Trace(inputs={"n": n}, outputs={"n": n}, tags={"kind": "best"}) for n in range(3)]
        log_traces(tracker, run.run_id, traces[:2])
        log_traces(tracker, run.run_id, traces)
        found = tracker.client.search_traces(locations=[run.experiment_id], run_id=run.run_id)
    assert sorted(trace.info.tags["number"] for trace in found) == ["0", "1", "2"]


def test_a_trace_of_which_a_kill_left_the_spans_alone_is_removed(
    tracked_home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill between two transactions of MLflow; tests/chaos kills there in earnest."""
    tracker = open_tracker(tracked_home)
    traces = [Trace(inputs={"n": n}, outputs={"n": n}, tags={"kind": "best"}) for n in range(2)]

    def killed(*_: object) -> None:
        raise RuntimeError("killed")

    with tracker.start_run("traced", "grpo", tags={}) as run, tracker.start_run("traced", "other", tags={}) as other:
        with monkeypatch.context() as patched:
            patched.setattr(SqlAlchemyStore, "start_trace", killed)
            log_traces(tracker, run.run_id, traces)
            log_traces(tracker, other.run_id, traces[:1])
        log_traces(tracker, run.run_id, traces)
        assert count(tracked_home) == 3  # the other run may still be at work
        log_traces(tracker, other.run_id, traces[:1])
    assert count(tracked_home) == 3


def count(home: Home) -> int:
    with closing(sqlite3.connect(home.root / "mlflow.db")) as database:
        return int(database.execute("SELECT count(*) FROM trace_info").fetchone()[0])
