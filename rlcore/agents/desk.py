"""Waiting requests of many agents, which one engine call answers together.

    agents ─ put ─▶ waiting ─ take ─▶ engine.sample ─▶ finish of each ticket

While the engine works, requests gather for its next call. If it is idle, the first request waits a moment for others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from rlcore.errors import SamplingError
from rlcore.sampling.base import Sampler, SamplingParams
from rlcore.types import FailedRollout, Prompt, Rollout

GRACE_SECONDS = 0.005  # after each request, for the next one
MAX_GRACE_SECONDS = 0.05
Made = Rollout | FailedRollout


@dataclass(eq=False, slots=True)
class Ticket:
    """Waiting request for one completion.

    ``draw``: number that decides the random draw, whatever else is sampled. ``limit``: on new tokens. ``owner``: agent
    that waits. ``finish`` is called with the completion in the thread of :meth:`Desk.serve`.
    """

    prompt: Prompt
    draw: int
    limit: int
    owner: object
    finish: Callable[[Made], None]
    is_started: bool = field(default=False, init=False)


class Desk:
    """Waiting requests. ``num_agents`` returns the number of agents; if all of them wait, nobody is waited for."""

    def __init__(self, num_agents: Callable[[], int]) -> None:
        self._num_agents = num_agents
        self._waiting: list[Ticket] = []
        self._changed = threading.Condition()
        self.num_calls = self.num_requests = 0

    def put(self, tickets: Sequence[Ticket]) -> None:
        """Add requests."""
        with self._changed:
            self._waiting.extend(tickets)
            self._changed.notify_all()

    def drop(self, tickets: Iterable[Ticket]) -> bool:
        """Remove waiting requests. Return False, and remove none, if the engine has begun one of them."""
        with self._changed:
            dropped = list(tickets)
            if any(ticket.is_started for ticket in dropped):
                return False
            self._waiting = [ticket for ticket in self._waiting if ticket not in dropped]
            return True

    @property
    def num_waiting(self) -> int:
        """Number of waiting requests."""
        return len(self._waiting)

    def take(self, timeout_seconds: float) -> list[Ticket]:
        """Return all waiting requests, after a moment for those that are about to come; none after the timeout."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._waiting, timeout_seconds):
                return []
            end = time.monotonic() + MAX_GRACE_SECONDS
            while len({id(ticket.owner) for ticket in self._waiting}) < self._num_agents():
                left = min(GRACE_SECONDS, end - time.monotonic())
                if left <= 0 or not self._changed.wait(left):
                    break
            taken, self._waiting = self._waiting, []
            for ticket in taken:
                ticket.is_started = True
            return taken

    def serve(self, tickets: Sequence[Ticket], engine: Sampler, params: SamplingParams, *, seed: int) -> None:
        """Sample the completions and finish the tickets. Each completion is cut at its own limit.

        An engine may refuse a prompt for which the largest limit of all leaves no room; it is then sampled again.

        Raises:
            SamplingError: The engine is broken, or did not read the tokens of a request.
        """
        pending = list(tickets)
        while pending:
            largest = max(ticket.limit for ticket in pending)
            groups = engine.sample(
                [ticket.prompt for ticket in pending],
                replace(params, max_new_tokens=largest, num_samples=1),
                seed=seed,
                places=[ticket.draw for ticket in pending],
            )
            self.num_calls, self.num_requests = self.num_calls + 1, self.num_requests + len(pending)
            again = []
            for ticket, (made,) in zip(pending, groups, strict=True):
                if isinstance(made, FailedRollout) and ticket.limit < largest:
                    again.append(ticket)
                else:
                    ticket.finish(_within_limit(ticket, made))
            pending = again


def _within_limit(ticket: Ticket, made: Made) -> Made:
    """Cut a completion at the ticket's own limit.

    Raises:
        SamplingError: The engine read other tokens.
    """
    if isinstance(made, FailedRollout):
        return made
    if made.prompt.token_ids != ticket.prompt.token_ids:
        raise SamplingError(f"the engine did not read the tokens of the request {ticket.prompt.prompt_id!r}")
    if len(made.completion_ids) <= ticket.limit:
        return made
    return replace(
        made,
        completion_ids=made.completion_ids[: ticket.limit],
        sampler_logprobs=made.sampler_logprobs[: ticket.limit],
        loss_mask=made.loss_mask[: ticket.limit],
        finish_reason="length",
    )
