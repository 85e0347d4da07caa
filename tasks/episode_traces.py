"""Episodes of several turns as MLflow traces: a span per turn and per tool, to be read step by step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain, islice

from rlcore.types import ScoredRollout
from tasks.tracking import RunTracker

TRACES = 8  # per iteration: one costs about 40 ms


def log_episodes(tracker: RunTracker, iteration: int, groups: Sequence[Sequence[ScoredRollout]]) -> None:
    """The iteration's first episodes that called a tool, under the run, with reward and parts as attributes."""
    called = (item for item in chain.from_iterable(groups) if item.rollout.tool_calls)
    for item in islice(called, TRACES):
        _log_episode(tracker, iteration, item)


def _log_episode(tracker: RunTracker, iteration: int, item: ScoredRollout) -> None:
    rollout, score = item.rollout, item.score
    parts = {f"part/{name}": str(value) for name, value in score.parts.items()}
    root = tracker.client.start_trace(
        f"iteration {iteration}: {rollout.prompt.prompt_id}",
        span_type="AGENT",
        inputs={"messages": [{"role": each.role, "content": each.content} for each in rollout.prompt.messages]},
        attributes={"reward": str(score.value), "reference": rollout.prompt.reference, **parts},
        tags={"iteration": str(iteration), "policy_version": str(rollout.policy_version)},
        experiment_id=tracker.experiment_id,
        run_id=tracker.run_id,
    )
    span = partial(_log_span, tracker, trace_id=root.trace_id, parent_id=root.span_id)
    for call in rollout.tool_calls:
        span("turn", kind="LLM", output=call.text)
        span(call.tool or "malformed call", kind="TOOL", output=call.output)
    span("last turn", kind="LLM", output=rollout.text)
    tracker.client.end_trace(root.trace_id, outputs={"text": rollout.text, "finish_reason": rollout.finish_reason})


def _log_span(tracker: RunTracker, name: str, *, trace_id: str, parent_id: str, kind: str, output: str) -> None:
    span = tracker.client.start_span(name, trace_id=trace_id, parent_id=parent_id, span_type=kind)
    tracker.client.end_span(trace_id, span.span_id, outputs={"text": output})
