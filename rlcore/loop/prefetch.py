"""Rollout prefetch: sample the prompts of later iterations during the update.

    iteration      1              2              3
    engine     [R1][R2]       [R3]           [R4]          staleness 1: R1 and R2 are sampled with the same weights,
    learner        [U1 on R1] [U2 on R2]     [U3 on R3]    so R2 is one update old when U2 begins
    sync                     |              |              after both: no request runs while weights are loaded

With ``staleness = k`` the rollouts of iteration i are sampled with the weights of iteration i - 1 - k, whatever the
speed. If k > 1, the engine loads a copy of the weights between two batches. A checkpoint stores the rollouts of the
next k iterations, because the weights that sampled them are gone by then.
"""

from __future__ import annotations

import contextvars
import dataclasses
import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from rlcore.types import Message, Prompt, Rollout, ScoredRollout, ToolCall

Groups = list[list[Rollout]]


class RolloutPrefetcher:
    """Rollouts of later iterations, which one thread samples in order."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rollout-prefetch")
        self._batches: dict[int, Future[Groups]] = {}

    def get(
        self,
        sample: Callable[[int], Groups],
        iteration: int,
        *,
        until: int,
        prepare: Callable[[], Callable[[], None] | None] = lambda: None,
    ) -> Groups:
        """Return the rollouts of ``iteration``, from 1 on, and start sampling up to ``until``.

        ``sample``: sample the rollouts of an iteration with the weights that the engine serves. ``prepare``: return a
        function that loads newer weights, or None; it runs before the first new batch, after all earlier ones.

        Raises:
            RlcoreError: Sampling of these or of later rollouts failed.
        """
        new = [number for number in range(iteration, until + 1) if number not in self._batches]
        load = prepare() if new else None
        for number in new:
            # The thread gets the caller's context, so that its log lines belong to the same run.
            context = contextvars.copy_context()
            self._batches[number] = self._thread.submit(context.run, _load_and_sample, load, sample, number)
            load = None
        for batch in self._batches.values():
            if batch.done():
                batch.result()
        return self._batches.pop(iteration).result()

    def drain(self) -> None:
        """Return when the engine is idle; raise the error of a batch that failed."""
        for batch in self._batches.values():
            batch.result()

    def state(self) -> str:
        """Return the prefetched rollouts as JSON for a checkpoint, or "" if there are none."""
        batches = [to_json(batch.result()) for _, batch in sorted(self._batches.items())]
        return json.dumps(batches) if batches else ""

    def restore(self, state: str, first: int, prompts_for: Callable[[int], Sequence[Prompt]]) -> None:
        """Restore a state of :meth:`state`, whose first batch is of the iteration ``first``."""
        self._batches = {}
        for number, batch in enumerate(json.loads(state) if state else [], start=first):
            self._batches[number] = Future()
            self._batches[number].set_result(from_json(batch, prompts_for(number)))

    def close(self) -> None:
        """Wait for the engine and end the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)


def mean_staleness(scored: Sequence[Sequence[ScoredRollout]], policy_version: int) -> float:
    """Return the staleness in updates, as a mean over completion tokens."""
    items = [sample for group in scored for item in group for sample in item.rollout.samples]
    tokens = sum(len(rollout.completion_ids) for rollout in items)
    ages = sum((policy_version - rollout.policy_version) * len(rollout.completion_ids) for rollout in items)
    return ages / max(1, tokens)


def _load_and_sample(load: Callable[[], object] | None, sample: Callable[[int], Groups], iteration: int) -> Groups:
    if load:
        load()
    return sample(iteration)


def to_json(groups: Sequence[Sequence[Rollout]]) -> str:
    """Serialize groups exactly, with their branches and the changes that environments and agents made to prompts."""
    return json.dumps([_group(group) for group in groups])


def from_json(text: str, prompts: Sequence[Prompt]) -> Groups:
    """Restore the groups of :func:`to_json`, given their prompts in the same order."""
    groups = zip(json.loads(text), prompts, strict=True)
    return [
        [_rollout(record, _prompt(group["prompt"], prompt)) for record in group["rollouts"]] for group, prompt in groups
    ]


def _group(group: Sequence[Rollout]) -> dict[str, Any]:
    shared = _prompt_fields(group[0].prompt) if group else {}
    return {"prompt": shared, "rollouts": [_record(rollout, shared) for rollout in group]}


def _prompt_fields(prompt: Prompt) -> dict[str, Any]:
    messages = [dataclasses.asdict(message) for message in prompt.messages]
    return {"messages": messages, "token_ids": prompt.token_ids, "tools": prompt.tools}


def _prompt(fields: dict[str, Any], prompt: Prompt) -> Prompt:
    if not fields:
        return prompt
    messages = tuple(Message(**message) for message in fields["messages"])
    return dataclasses.replace(prompt, messages=messages, token_ids=tuple(fields["token_ids"]), tools=fields["tools"])


def _record(rollout: Rollout, shared: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a rollout; its prompt is empty if it is the group's."""
    fields = {field.name: getattr(rollout, field.name) for field in dataclasses.fields(rollout)}
    own = _prompt_fields(rollout.prompt)
    return fields | {
        "prompt": {} if own == shared else own,
        "tool_calls": [dataclasses.asdict(call) for call in rollout.tool_calls],
        "branches": [_record(branch, shared) for branch in rollout.branches],
    }


def _rollout(record: dict[str, Any], prompt: Prompt) -> Rollout:
    lists = {name: tuple(record[name]) for name in ("completion_ids", "sampler_logprobs", "loss_mask")}
    calls = tuple(ToolCall(**call) for call in record["tool_calls"])
    branches = tuple(_rollout(branch, prompt) for branch in record["branches"])
    own = _prompt(record["prompt"], prompt)
    return Rollout(**{**record, **lists, "tool_calls": calls, "branches": branches, "prompt": own})
