"""Rollouts one iteration ahead: while the update of an iteration runs, the engine samples the next one's prompts.

    iteration      1              2              3
    engine     [R1][R2]       [R3]           [R4]          R2 is sampled with the weights that R1 was: one update old
    learner        [U1 on R1] [U2 on R2]     [U3 on R3]    when U2 begins
    sync                     |              |              after both: no request runs while weights are loaded

Nothing is under way between two iterations, so what a checkpoint has to keep is finished: the next rollouts themselves,
because the weights that sampled them are gone by then.
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
    """The rollouts of the next iteration, being sampled in a thread or done."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rollouts-ahead")
        self._next: Future[Groups] | None = None

    def advance(self, sample: Callable[[int], Groups], iteration: int, *, last: int) -> Groups:
        """The rollouts of ``iteration``, sampled now where none were sampled ahead; those of the next are begun.

        ``sample`` makes the rollouts of an iteration with the weights that the engine serves. Call :meth:`wait` before
        the engine is given others.
        """
        ready, self._next = self._next, None
        groups = ready.result() if ready else sample(iteration)
        if iteration < last:
            # The caller's context goes along: what is logged in the thread belongs to the same run.
            self._next = self._thread.submit(contextvars.copy_context().run, sample, iteration + 1)
        return groups

    def wait(self) -> None:
        """Return when the engine is idle.

        Raises:
            RlcoreError: what the sampling raised.
        """
        if self._next:
            self._next.result()

    def state(self) -> str:
        """What a checkpoint keeps: the finished rollouts as JSON, empty where there are none."""
        return to_json(self._next.result()) if self._next else ""

    def restore(self, state: str, prompts: Sequence[Prompt]) -> None:
        """Go on with what :meth:`state` gave, and with nothing else; ``prompts``: of the iteration that it is for."""
        self._next = None
        if state:
            self._next = Future()
            self._next.set_result(from_json(state, prompts))

    def close(self) -> None:
        """Wait for the engine and end the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)


def mean_staleness(scored: Sequence[Sequence[ScoredRollout]], policy_version: int) -> float:
    """How many updates the learner is ahead of the weights that sampled."""
    versions = [item.rollout.policy_version for group in scored for item in group]
    return policy_version - sum(versions) / max(1, len(versions))


def to_json(groups: Sequence[Sequence[Rollout]]) -> str:
    """Groups without their prompts, which are known; numbers exactly as they are."""
    return json.dumps([[_record(rollout) for rollout in group] for group in groups])


def from_json(text: str, prompts: Sequence[Prompt]) -> Groups:
    """The groups that :func:`to_json` was given, of these prompts in this order."""
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
