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
import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from pydantic import TypeAdapter

from rlcore.types import Prompt, Rollout, ScoredRollout

Groups = list[list[Rollout]]
_BATCHES, _PROMPTS = TypeAdapter(list[Groups]), TypeAdapter(list[Prompt])


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
        batches = [batch.result() for _, batch in sorted(self._batches.items())]
        return _stored(batches) if batches else ""

    def restore(self, state: str, first: int) -> None:
        """Restore a state of :meth:`state`, whose first batch is of the iteration ``first``."""
        self._batches = {}
        for number, batch in enumerate(_restored(state) if state else [], start=first):
            self._batches[number] = Future()
            self._batches[number].set_result(batch)

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


def _stored(batches: list[Groups]) -> str:
    """Serialize rollouts, each prompt once: a prompt may have a megabyte of tests as its reference."""
    prompts: dict[str, int] = {}

    def numbered(made: Any) -> Any:
        if isinstance(made, dict):
            number = prompts.setdefault(json.dumps(made["prompt"]), len(prompts))
            return made | {"prompt": number, "branches": [numbered(each) for each in made["branches"]]}
        return [numbered(each) for each in made]

    found = numbered(_BATCHES.dump_python(batches))
    return json.dumps({"prompts": [json.loads(each) for each in prompts], "batches": found})


def _restored(state: str) -> list[Groups]:
    found = json.loads(state)
    prompts = _PROMPTS.validate_python(found["prompts"])

    def whole(made: Any) -> Any:
        if isinstance(made, dict):
            return made | {"prompt": prompts[made["prompt"]], "branches": [whole(each) for each in made["branches"]]}
        return [whole(each) for each in made]

    return _BATCHES.validate_python(whole(found["batches"]))
