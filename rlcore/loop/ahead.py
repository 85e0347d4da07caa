"""Rollouts one iteration ahead: the engine samples the prompts of the next iteration while an update runs.

    iteration      1              2              3
    engine     [R1][R2]       [R3]           [R4]          R2 is sampled with the weights of R1, so it is one update
    learner        [U1 on R1] [U2 on R2]     [U3 on R3]    old when U2 begins
    sync                     |              |              after both: no request runs while weights are loaded

Nothing is under way between two iterations. A checkpoint keeps the finished rollouts of the next one, because the
weights that sampled them are gone when the run resumes.
"""

from __future__ import annotations

import contextvars
import dataclasses
import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from rlcore.types import Prompt, Rollout, ScoredRollout, ToolCall

Groups = list[list[Rollout]]


class RolloutsAhead:
    """The rollouts of the next iteration, which a thread samples or has sampled."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rollouts-ahead")
        self._next: Future[Groups] | None = None

    def advance(self, sample: Callable[[int], Groups], iteration: int, *, last: int) -> Groups:
        """The rollouts of ``iteration``, which are sampled now if they were not sampled ahead; the next are begun.

        ``sample`` makes the rollouts of an iteration with the weights that the engine serves. Call :meth:`wait` before
        the engine gets new weights.
        """
        ready, self._next = self._next, None
        groups = ready.result() if ready else sample(iteration)
        if iteration < last:
            # The thread gets the caller's context, so that what it logs belongs to the same run.
            self._next = self._thread.submit(contextvars.copy_context().run, sample, iteration + 1)
        return groups

    def wait(self) -> None:
        """Return when the engine is idle.

        Raises:
            RlcoreError: the sampling raised it.
        """
        if self._next:
            self._next.result()

    def state(self) -> str:
        """What a checkpoint keeps: the finished rollouts as JSON, or an empty text if there are none."""
        return to_json(self._next.result()) if self._next else ""

    def restore(self, state: str, prompts: Sequence[Prompt]) -> None:
        """Resume from what :meth:`state` gave, and drop all else; ``prompts``: those of the next iteration."""
        self._next = None
        if state:
            self._next = Future()
            self._next.set_result(from_json(state, prompts))

    def close(self) -> None:
        """Wait for the engine and end the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)


def mean_staleness(scored: Sequence[Sequence[ScoredRollout]], policy_version: int) -> float:
    """The mean number of updates between the weights that sampled and the learner's."""
    versions = [item.rollout.policy_version for group in scored for item in group]
    return policy_version - sum(versions) / max(1, len(versions))


def to_json(groups: Sequence[Sequence[Rollout]]) -> str:
    """Groups without their prompts, which the reader knows. Numbers keep every bit."""
    return json.dumps([[_record(rollout) for rollout in group] for group in groups])


def from_json(text: str, prompts: Sequence[Prompt]) -> Groups:
    """The groups that :func:`to_json` was given; ``prompts``: theirs, in their order."""
    groups = zip(json.loads(text), prompts, strict=True)
    return [[_rollout(record, prompt) for record in group] for group, prompt in groups]


def _record(rollout: Rollout) -> dict[str, Any]:
    fields = {field.name: getattr(rollout, field.name) for field in dataclasses.fields(rollout)}
    del fields["prompt"]
    return fields | {"tool_calls": [dataclasses.asdict(call) for call in rollout.tool_calls]}


def _rollout(record: dict[str, Any], prompt: Prompt) -> Rollout:
    lists = {name: tuple(record[name]) for name in ("completion_ids", "sampler_logprobs", "loss_mask")}
    calls = tuple(ToolCall(**call) for call in record["tool_calls"])
    return Rollout(**{**record, **lists, "tool_calls": calls, "prompt": prompt})
