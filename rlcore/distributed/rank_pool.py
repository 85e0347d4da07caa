"""The ranks of a group: the same request to each of them, one answer for all.

Which processes they are, and who starts and ends them, is a crew's matter. One that dies, raises, or does not answer in
time is named at once; where the others may be waiting for it, all are ended.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import torch

from rlcore.config.placement import PlacementConfig
from rlcore.distributed.serialization import decode, decode_error, encode, is_error
from rlcore.errors import LearnerLostError
from rlcore.hardware.runtime import Runtime

_GRACE_SECONDS = 5.0  # for the others' answers, after one rank has failed


class RankTransport(Protocol):
    """Processes that can be ranks; ``size`` of them run."""

    @property
    def size(self) -> int: ...

    def start(self, setups: Sequence[Mapping[str, Any]]) -> None:
        """Start a process with each setup, and add to it what depends on where it runs; they answer when ready."""
        ...

    def send(self, request: bytes) -> set[int]:
        """Ask every rank; the ranks that could not be reached."""
        ...

    def receive(self, silent: Collection[int], seconds: float) -> dict[int, bytes | None]:
        """New answers of ``silent`` ranks by their number, after waiting for one; None of a rank that died."""
        ...

    def exit_reason(self, rank: int) -> str:
        """How a rank ended: ``was ended by SIGKILL``."""
        ...

    def exported(self) -> Mapping[str, torch.Tensor]:
        """The weights that the first rank has gathered."""
        ...

    def end(self) -> None:
        """Kill every rank: what it was in the middle of, others may wait for."""
        ...

    def close(self) -> None:
        """End what is left of the ranks when none is started any more."""
        ...


def rank_setup(placement: PlacementConfig, runtime: Runtime, rank: int, *, adapted: bool) -> dict[str, Any]:
    """What every rank is told of its place among the others, and of what it computes in; a crew adds where it runs."""
    return {
        "rank": rank,
        "size": placement.learner_ranks,
        "seconds": 60.0 * placement.timeout_minutes,
        "dtype": str(runtime.compute_dtype).removeprefix("torch."),
        "recompute": runtime.recompute,
        "sharded": placement.is_sharded(adapted=adapted),
        "narrow": placement.gather_in_compute_dtype,
        "offload": placement.cpu_offload,
        "width": placement.tensor_parallel,
    }


class RankPool:
    """Ranks that are started, asked and ended together. ``seconds``: how long they may take for one request.

    ``ran_out``: whether the last ones were lost because a rank had no memory left.
    """

    def __init__(self, crew: RankTransport, seconds: float) -> None:
        self.crew, self.ran_out = crew, False
        self._seconds = seconds

    @property
    def is_running(self) -> bool:
        """Whether there are ranks to ask."""
        return self.crew.size > 0

    def start(self, setups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Start a rank with each setup; the first one's answer, when all are ready.

        Raises:
            LearnerLostError, RlcoreError: as :meth:`ask`.
        """
        self.crew.start(setups)
        return self._answer("start")

    def ask(self, method: str, *arguments: Any, **settings: Any) -> dict[str, Any]:
        """The first rank's answer to a request, when all have given theirs.

        Raises:
            LearnerLostError: a rank died, ran out of memory, failed, or is silent; all are ended.
            RlcoreError: what a rank raised.
        """
        if not self.is_running:
            raise LearnerLostError("the ranks are gone", fix="start the same command again: it resumes")
        if lost := self.crew.send(encode((method, arguments, settings))):
            raise self._lost(method, lost, {})
        return self._answer(method)

    def end(self) -> None:
        """Kill every rank."""
        self.crew.end()

    def close(self) -> None:
        """Kill every rank, for good."""
        self.crew.end()
        self.crew.close()

    def _answer(self, method: str) -> dict[str, Any]:
        try:
            answers, dead, silent = self._listen()
        except BaseException:  # an interrupt: an answer that comes later would be taken for that of the next request
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
        """The answers by rank, the ranks that died, and those that are silent; a failure cuts the wait for others."""
        silent, dead = set(range(self.crew.size)), set[int]()
        answers: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + self._seconds
        while silent and (found := self.crew.receive(silent, max(0.0, deadline - time.monotonic()))):
            silent -= found.keys()
            dead |= {rank for rank, answer in found.items() if answer is None}
            answers |= {rank: decode(answer) for rank, answer in found.items() if answer is not None}
            if dead or any(map(is_error, answers.values())):
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        return answers, dead, tuple(sorted(silent))

    def _lost(
        self, method: str, dead: set[int], errors: Mapping[int, Mapping[str, Any]], *, silent: tuple[int, ...] = ()
    ) -> LearnerLostError:
        """End what is left, and say which rank was lost and how."""
        reasons = [f"rank {rank} {self.crew.exit_reason(rank)}" for rank in sorted(dead)]
        short = {rank: error["memory"] for rank, error in errors.items() if "memory" in error}
        if not reasons and short:
            reasons = [f"rank {rank} ran out of memory ({why})" for rank, why in short.items()]
        if not reasons:
            reasons = [f"rank {rank} failed: {error['crash']}" for rank, error in errors.items() if "crash" in error]
        if not reasons:
            minutes = self._seconds / 60.0
            reasons = [f"rank {rank} did not answer within {minutes:g} minutes" for rank in silent]
        self.ran_out = bool(short) and not dead
        size = self.crew.size
        self.end()
        return LearnerLostError(
            f"{'; '.join(reasons)}, in {method!r} of {size} ranks",
            where="distributed",
            fix="the run goes on from its newest checkpoint, as does the same command when it is started again",
        )
