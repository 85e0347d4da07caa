"""Rollouts of a run as MLflow traces, which its interface lists, searches and opens next to the run's curves.

A trace and its id are a function of the run and the content, so that storing one again changes nothing. If some are
missing, after a kill or a full disk, all are stored again.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

from rlcore.tasks.tracking.retry import retry_while_unavailable
from rlcore.tasks.tracking.runs import Tracker

if TYPE_CHECKING:
    from mlflow.entities import Run, Span, TraceInfo

_MILLISECOND = 1_000_000  # nanoseconds
_OF_RUN = "of_run"  # a tag that is stored last: a trace that has it is complete
_NAME = "rollout"


@dataclass(frozen=True, kw_only=True)
class Step:
    """Part of an episode, shown below it: a turn, or a branch with its turns."""

    name: str
    inputs: Mapping[str, Any]
    outputs: Mapping[str, Any]
    steps: tuple[Step, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Rollout: its prompt, its completion, and ``tags`` to search by (``kind``, ``iteration``, ``reward``, …)."""

    inputs: Mapping[str, Any]
    outputs: Mapping[str, Any]
    tags: Mapping[str, str]
    steps: tuple[Step, ...] = ()


def log_traces(tracker: Tracker, run_id: str, traces: Sequence[Trace]) -> None:
    """Store the missing traces of a run; the interface, newest first, lists them in this order.

    Their time is the run's end. Each costs tens of milliseconds of processor time, so they are few, and are stored
    after a run.
    """
    run = tracker.get_run(run_id) if traces else None
    if run is None:
        return
    known = _stored(tracker, run)
    end = max(run.info.start_time, run.info.end_time or 0)
    missing = {_id(run_id, trace): (trace, end - place) for place, trace in reversed([*enumerate(traces)])}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # MLflow warns about its type hints when its tracing is imported
        for name, (trace, moment) in missing.items():
            if name not in known:
                retry_while_unavailable(_store, tracker, run, name, trace, moment)


def _id(run_id: str, trace: Trace) -> str:
    content = {key: value for key, value in asdict(trace).items() if value or key != "steps"}
    return hashlib.sha256(json.dumps([run_id, content], sort_keys=True).encode()).hexdigest()[:32]


def _stored(tracker: Tracker, run: Run) -> set[str]:
    query = f"tags.{_OF_RUN} = '{run.info.run_id}'"
    found = tracker.client.search_traces(
        locations=[run.info.experiment_id], filter_string=query, include_spans=False, max_results=500
    )
    return {trace.info.trace_id.removeprefix("tr-") for trace in found}


def _store(tracker: Tracker, run: Run, name: str, trace: Trace, moment: int) -> None:
    from mlflow.tracing.client import TracingClient

    client = TracingClient(tracker.uri)
    root = Step(name=_NAME, inputs=trace.inputs, outputs=trace.outputs, steps=trace.steps)
    placed = list(_placed(root, None, count()))
    spans = [_span(name, step, moment, place=place, parent=parent) for place, parent, step in placed]
    client.log_spans(run.info.experiment_id, spans)
    client.start_trace(_info(run, name, trace, moment))


def _placed(step: Step, parent: int | None, places: Iterator[int]) -> Iterator[tuple[int, int | None, Step]]:
    place = next(places)
    yield place, parent, step
    for each in step.steps:
        yield from _placed(each, place, places)


def _span(name: str, step: Step, moment: int, *, place: int, parent: int | None) -> Span:
    """Return a span; its start, nanoseconds after the root's, keeps the order in which the interface shows siblings."""
    from mlflow.entities import Span
    from mlflow.tracing.constant import SpanAttributeKey
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import SpanContext
    from opentelemetry.trace.status import Status, StatusCode

    held = {
        SpanAttributeKey.REQUEST_ID: f"tr-{name}",
        SpanAttributeKey.INPUTS: dict(step.inputs),
        SpanAttributeKey.OUTPUTS: dict(step.outputs),
    }

    def context(of: int) -> SpanContext:
        return SpanContext(trace_id=int(name, 16), span_id=(int(name[:16], 16) + of) % 2**64, is_remote=False)

    return Span(
        ReadableSpan(
            name=step.name,
            context=context(place),
            parent=None if parent is None else context(parent),
            start_time=moment * _MILLISECOND + place,
            end_time=moment * _MILLISECOND + place,
            attributes={key: json.dumps(value) for key, value in held.items()},
            status=Status(StatusCode.OK),
            resource=Resource.get_empty(),
        )
    )


def _info(run: Run, name: str, trace: Trace, moment: int) -> TraceInfo:
    from mlflow.entities import TraceInfo, TraceLocation, TraceState
    from mlflow.tracing.constant import TRACE_SCHEMA_VERSION, TRACE_SCHEMA_VERSION_KEY, TraceMetadataKey, TraceTagKey

    return TraceInfo(
        trace_id=f"tr-{name}",
        trace_location=TraceLocation.from_experiment_id(run.info.experiment_id),
        request_time=moment,
        execution_duration=0,
        state=TraceState.OK,
        request_preview=json.dumps(trace.inputs)[:1000],
        response_preview=json.dumps(trace.outputs)[:1000],
        trace_metadata={
            TraceMetadataKey.SOURCE_RUN: run.info.run_id,
            TRACE_SCHEMA_VERSION_KEY: str(TRACE_SCHEMA_VERSION),
        },
        tags={**trace.tags, TraceTagKey.TRACE_NAME: _NAME, _OF_RUN: run.info.run_id},
    )
