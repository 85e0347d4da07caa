"""Rollouts ahead of the update: while iterations learn, the engine samples the prompts of those to come.

    iteration      1              2              3
    engine     [R1][R2]       [R3]           [R4]          one ahead: R2 is sampled with the weights that R1 was, and
    learner        [U1 on R1] [U2 on R2]     [U3 on R3]    is one update old when U2 begins
    sync                     |              |              after both: no request runs while weights are loaded

With ``staleness = k`` the rollouts of iteration i are sampled with the weights of iteration i - 1 - k: which ones is
decided before the run, whoever is faster. So at most k batches are done and not trained on; the engine waits then for
the next weights, as the learner waits for rollouts. Beyond one ahead the engine does not stop for the learner: it takes
a copy of the weights between two batches.

A checkpoint keeps the rollouts of the k iterations to come, because the weights that sampled them are gone by then.
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
    """The rollouts of iterations to come, being sampled in a thread one after another, or done."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rollouts-ahead")
        self._batches: dict[int, Future[Groups]] = {}

    def get(
        self,
        sample: Callable[[int], Groups],
        iteration: int,
        *,
        until: int,
        prepare: Callable[[], Callable[[], None] | None] = lambda: None,
    ) -> Groups:
        """The rollouts of ``iteration``; those up to ``until`` are begun, where they are not.

        ``sample`` makes the rollouts of an iteration with the weights that the engine serves. Where some are begun,
        ``prepare`` gives what loads others before them, and after all that were begun earlier.

        Raises:
            RlcoreError: what the sampling raised, of these rollouts or of later ones.
        """
        new = [number for number in range(iteration, until + 1) if number not in self._batches]
        load = prepare() if new else None
        for number in new:
            # The caller's context goes along: what is logged in the thread belongs to the same run.
            context = contextvars.copy_context()
            self._batches[number] = self._thread.submit(context.run, _loaded, load, sample, number)
            load = None
        for batch in self._batches.values():
            if batch.done():
                batch.result()
        return self._batches.pop(iteration).result()

    def drain(self) -> None:
        """Return when the engine is idle.

        Raises:
            RlcoreError: what the sampling raised.
        """
        for batch in self._batches.values():
            batch.result()

    def state(self) -> str:
        """What a checkpoint keeps: the rollouts of the iterations to come as JSON, empty where there are none."""
        batches = [to_json(batch.result()) for _, batch in sorted(self._batches.items())]
        return json.dumps(batches) if batches else ""

    def restore(self, state: str, first: int, prompts_of: Callable[[int], Sequence[Prompt]]) -> None:
        """Go on before iteration ``first`` with what :meth:`state` gave there, and with nothing else.

        ``prompts_of``: the prompts of an iteration.
        """
        self._batches = {}
        for number, batch in enumerate(json.loads(state) if state else [], start=first):
            self._batches[number] = Future()
            self._batches[number].set_result(from_json(batch, prompts_of(number)))

    def close(self) -> None:
        """Wait for the engine and end the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)


def mean_staleness(scored: Sequence[Sequence[ScoredRollout]], policy_version: int) -> float:
    """How many updates the learner is ahead of the weights that sampled, as a mean over completion tokens."""
    items = [item.rollout for group in scored for item in group]
    tokens = sum(len(rollout.completion_ids) for rollout in items)
    ages = sum((policy_version - rollout.policy_version) * len(rollout.completion_ids) for rollout in items)
    return ages / max(1, tokens)


def _loaded(load: Callable[[], object] | None, sample: Callable[[int], Groups], iteration: int) -> Groups:
    if load:
        load()
    return sample(iteration)


def to_json(groups: Sequence[Sequence[Rollout]]) -> str:
    """Groups with what their environments made of the prompts; numbers exactly as they are."""
    return json.dumps([{"prompt": _asked(group), "rollouts": [_record(one) for one in group]} for group in groups])


def from_json(text: str, prompts: Sequence[Prompt]) -> Groups:
    """The groups that :func:`to_json` was given, of these prompts in this order."""
    groups = zip(json.loads(text), prompts, strict=True)
    return [_group(group["rollouts"], _prompt(group["prompt"], prompt)) for group, prompt in groups]


def _asked(group: Sequence[Rollout]) -> dict[str, Any]:
    """The fields of a group's prompt that an environment changes; empty for a group without rollouts."""
    if not group:
        return {}
    prompt = group[0].prompt
    messages = [dataclasses.asdict(message) for message in prompt.messages]
    return {"messages": messages, "token_ids": prompt.token_ids, "tools": prompt.tools}


def _prompt(asked: dict[str, Any], prompt: Prompt) -> Prompt:
    if not asked:
        return prompt
    messages = tuple(Message(**message) for message in asked["messages"])
    return dataclasses.replace(prompt, messages=messages, token_ids=tuple(asked["token_ids"]), tools=asked["tools"])


def _group(records: Sequence[dict[str, Any]], prompt: Prompt) -> list[Rollout]:
    return [_rollout(record, prompt) for record in records]


def _record(rollout: Rollout) -> dict[str, Any]:
    fields = {field.name: getattr(rollout, field.name) for field in dataclasses.fields(rollout)}
    del fields["prompt"]
    return fields | {"tool_calls": [dataclasses.asdict(call) for call in rollout.tool_calls]}


def _rollout(record: dict[str, Any], prompt: Prompt) -> Rollout:
    lists = {name: tuple(record[name]) for name in ("completion_ids", "sampler_logprobs", "loss_mask")}
    calls = tuple(ToolCall(**call) for call in record["tool_calls"])
    return Rollout(**{**record, **lists, "tool_calls": calls, "prompt": prompt})
