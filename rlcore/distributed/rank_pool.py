"""Pool of learner ranks: send a request to all ranks, and return one answer.

A transport starts and ends the processes. A rank that dies, raises, or times out is reported immediately; if others may
be waiting for it, all are ended.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import torch

from rlcore.distributed.serialization import decode, decode_error, encode, is_error
from rlcore.errors import LearnerLostError

_GRACE_SECONDS = 5.0  # for the answers of other ranks after one has failed


class RankTransport(Protocol):
    """Protocol of processes that act as ranks; ``size`` of them run."""

    @property
    def size(self) -> int: ...

    def start(self, setups: Sequence[Mapping[str, Any]]) -> None:
        """Start a process with each setup, extended by its device and store. Ranks answer when they are ready."""
        ...

    def send(self, request: bytes) -> set[int]:
        """Send a request to every rank, and return the ranks that could not be reached."""
        ...

    def receive(self, silent: Collection[int], seconds: float) -> dict[int, bytes | None]:
        """Wait for an answer of ``silent`` ranks, and return new answers by rank; None for a dead rank."""
        ...

    def exit_reason(self, rank: int) -> str:
        """Return how a rank ended: ``was ended by SIGKILL``."""
        ...

    def exported(self) -> Mapping[str, torch.Tensor]:
        """Return the weights that the first rank has exported."""
        ...

    def end(self) -> None:
        """Kill every rank, because ranks may wait for each other."""
        ...

    def close(self) -> None:
        """Release all resources; no rank is started again."""
        ...


class RankPool:
    """Ranks that are started, called and ended together. ``seconds``: timeout of a request.

    ``ran_out``: True if the last ranks were lost because one ran out of memory.
    """

    def __init__(self, transport: RankTransport, seconds: float) -> None:
        self.transport, self.ran_out = transport, False
        self._seconds = seconds

    @property
    def is_running(self) -> bool:
        return self.transport.size > 0

    def start(self, setups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Start a rank with each setup, and return the first one's answer when all are ready.

        Raises:
            LearnerLostError, RlcoreError: As in :meth:`ask`.
        """
        self.transport.start(setups)
        return self._answer("start")

    def ask(self, method: str, *arguments: Any, **settings: Any) -> dict[str, Any]:
        """Send a request to all ranks, and return the first one's answer when all have answered.

        Raises:
            LearnerLostError: A rank died, ran out of memory, failed, or timed out; all are ended.
            RlcoreError: Raised by a rank.
        """
        if not self.is_running:
            raise LearnerLostError("no rank is running", fix="start the same command again: it resumes")
        if lost := self.transport.send(encode((method, arguments, settings))):
            raise self._lost(method, lost, {})
        return self._answer(method)

    def end(self) -> None:
        """Kill every rank."""
        self.transport.end()

    def close(self) -> None:
        """Kill every rank and release the transport."""
        self.transport.end()
        self.transport.close()

    def _answer(self, method: str) -> dict[str, Any]:
        try:
            answers, dead, silent = self._listen()
        except BaseException:  # an interrupt: a late answer would be taken for that of the next request
            self.end()
            raise
        errors = {rank: answer for rank, answer in answers.items() if is_error(answer)}
        if dead or (silent and not errors) or any("error" not in error for error in errors.values()):
            raise self._lost(method, dead, errors, silent=silent)
        if errors:
            if silent or method == "start":
                self.end()
            raise decode_error(min(errors.items())[1])
        return answers[0]

    def _listen(self) -> tuple[dict[int, dict[str, Any]], set[int], tuple[int, ...]]:
        """Return answers by rank, dead ranks and silent ranks. After a failure the others have a few seconds."""
        silent, dead = set(range(self.transport.size)), set[int]()
        answers: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + self._seconds
        while silent and (found := self.transport.receive(silent, max(0.0, deadline - time.monotonic()))):
            silent -= found.keys()
            dead |= {rank for rank, answer in found.items() if answer is None}
            answers |= {rank: decode(answer) for rank, answer in found.items() if answer is not None}
            if dead or any(map(is_error, answers.values())):
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        return answers, dead, tuple(sorted(silent))

    def _lost(
        self, method: str, dead: set[int], errors: Mapping[int, Mapping[str, Any]], *, silent: tuple[int, ...] = ()
    ) -> LearnerLostError:
        reasons = [f"rank {rank} {self.transport.exit_reason(rank)}" for rank in sorted(dead)]
        short = {rank: error["memory"] for rank, error in errors.items() if "memory" in error}
        if not reasons and short:
            reasons = [f"rank {rank} ran out of memory ({why})" for rank, why in short.items()]
        if not reasons:
            reasons = [f"rank {rank} failed: {error['crash']}" for rank, error in errors.items() if "crash" in error]
        if not reasons:
            minutes = self._seconds / 60.0
            reasons = [f"rank {rank} timed out after {minutes:g} minutes" for rank in silent]
        self.ran_out = bool(short) and not dead
        size = self.transport.size
        self.end()
        return LearnerLostError(
            f"{'; '.join(reasons)}, in {method!r} of {size} ranks",
            where="distributed",
            fix="the run resumes from its newest checkpoint, as does the same command",
        )
