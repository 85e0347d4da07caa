"""Some rollouts of a run as MLflow traces, which its interface lists, searches and opens beside the run's curves."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tasks.tracking.runs import Tracker

_MILLISECOND = 1_000_000  # nanoseconds
_OF_RUN, _NUMBER = "of_run", "number"  # tags: a trace is this one of its run
_PAGE = 500  # the most that MLflow gives at once


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One rollout: what was asked, what came, and ``tags`` to search by (``kind``, ``iteration``, ``reward``, …)."""

    inputs: Mapping[str, Any]
    outputs: Mapping[str, Any]
    tags: Mapping[str, str]


def log_traces(tracker: Tracker, run_id: str, traces: Sequence[Trace]) -> None:
    """Store the traces with the run; the interface, which has the newest first, lists them in this order.

    One costs 60 ms of processor time, so they are a few, and belong behind a run and not into it. What a call that was
    killed has stored already is not stored again.
    """
    stored = _stored(tracker, run_id) if traces else {}
    if traces:
        _remove_begun(tracker, run_id)
    missing = [number for number in range(len(traces)) if str(number) not in stored]
    from mlflow.tracing import reset

    reset()  # type: ignore[no-untyped-call]  # it keeps the store that the process's first trace went to, and a home has its own
    os.environ.setdefault("MLFLOW_ENABLE_ASYNC_TRACE_LOGGING", "false")  # its thread would speak at the process's end
    latest = time.time_ns()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # MLflow warns of type hints of its own, when its tracing is imported
        names = [
            _log(tracker, run_id, replace(trace, tags={**trace.tags, **_place(run_id, n)}), latest - n * _MILLISECOND)
            for n, trace in reversed(list(enumerate(traces)))
            if n in missing
        ]
    names += stored.values()
    if any(names):  # MLflow logs what it could not store, and raises nothing
        tracker.client.link_traces_to_run([name for name in names if name], run_id)


def _place(run_id: str, number: int) -> dict[str, str]:
    return {_OF_RUN: run_id, _NUMBER: str(number)}


def _stored(tracker: Tracker, run_id: str) -> dict[str, str]:
    """The ids of the traces of a run that are stored, by their numbers."""
    place = [tracker.client.get_run(run_id).info.experiment_id]
    query = f"tags.{_OF_RUN} = '{run_id}'"
    found = tracker.client.search_traces(locations=place, filter_string=query, include_spans=False)
    return {trace.info.tags[_NUMBER]: trace.info.trace_id for trace in found}


def _remove_begun(tracker: Tracker, run_id: str) -> None:
    """Remove what a killed call has begun: MLflow stores a trace's spans first, and what the trace is in a second step.

    Such a trace has no tags. Its span says which run it is of.
    """
    client, run = tracker.client, tracker.client.get_run(run_id)
    place = run.info.experiment_id
    since, page = f"timestamp_ms >= {run.info.start_time}", None
    begun: list[str] = []
    while page is None or page.token:
        page = client.search_traces(
            locations=[place],
            filter_string=since,
            max_results=_PAGE,
            page_token=page.token if page else None,
            include_spans=False,
        )
        unknown = [trace.info.trace_id for trace in page if _OF_RUN not in trace.info.tags]
        begun += [name for name in unknown if _is_of(client.get_trace(name), run_id)]
    if begun:
        client.delete_traces(place, trace_ids=begun)


def _is_of(trace: Any, run_id: str) -> bool:
    return any(span.attributes.get(_OF_RUN) == run_id for span in trace.data.spans)


def _log(tracker: Tracker, run_id: str, trace: Trace, moment: int) -> str:
    """Store one trace as of ``moment``, nanoseconds; its id, or an empty text where MLflow could not."""
    from mlflow.entities.span import NO_OP_SPAN_TRACE_ID

    span = tracker.client.start_trace(
        "rollout",
        inputs=dict(trace.inputs),
        attributes={_OF_RUN: trace.tags[_OF_RUN]},
        tags=dict(trace.tags),
        experiment_id=tracker.client.get_run(run_id).info.experiment_id,
        start_time_ns=moment,
    )
    if span.trace_id == NO_OP_SPAN_TRACE_ID:
        return ""
    tracker.client.end_trace(span.trace_id, outputs=dict(trace.outputs), end_time_ns=moment)
    return str(span.trace_id)
