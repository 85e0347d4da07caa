"""The processes that ranks are: their start, the same request to each of them, their end.

Each has a pipe of its own to this process. One that dies, raises, or does not answer in time is named at once; where
the others may be waiting for it, all are ended.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import rlcore.errors
from rlcore.errors import LearnerLostError, RlcoreError
from rlcore.training import rank_process
from rlcore.training.wire import decode, encode

_GRACE_SECONDS = 5.0  # for the others' answers, after one rank has failed


class RankPool:
    """Ranks that are started, asked and ended together. ``seconds``: how long they may take for one request.

    ``ran_out``: whether the last ones were lost because a rank had no memory left.
    """

    def __init__(self, seconds: float) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self.ran_out = False
        self._ends: list[Connection] = []
        self._seconds = seconds

    @property
    def is_running(self) -> bool:
        """Whether there are ranks to ask."""
        return bool(self.processes)

    def start(self, setups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Start a rank with each setup; the first one's answer, when all are ready.

        Raises:
            LearnerLostError, RlcoreError: as :meth:`ask`.
        """
        for setup in setups:
            ours, theirs = Pipe()
            self.processes.append(self.launch(theirs))
            theirs.close()
            self._ends.append(ours)
            ours.send_bytes(encode(setup))
        return self._answer("start")

    def ask(self, method: str, *arguments: Any, **settings: Any) -> dict[str, Any]:
        """The first rank's answer to a request, when all have given theirs.

        Raises:
            LearnerLostError: a rank died, ran out of memory, failed, or is silent; all are ended.
            RlcoreError: what a rank raised.
        """
        if not self.is_running:
            raise LearnerLostError("the ranks are gone", fix="start the same command again: it resumes")
        request = encode((method, arguments, settings))
        for rank, end in enumerate(self._ends):
            try:
                end.send_bytes(request)
            except OSError:
                raise self._lost(method, {rank}, {}) from None
        return self._answer(method)

    def end(self) -> None:
        """Kill every rank: what it was in the middle of, others may wait for."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
        for end in self._ends:
            end.close()
        self.processes, self._ends = [], []

    def launch(self, end: Connection) -> subprocess.Popen[bytes]:
        """A process that finds its setup and its requests at ``end``."""
        paths = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
        return subprocess.Popen(
            [sys.executable, "-m", rank_process.__name__, str(end.fileno()), str(os.getpid())],
            pass_fds=[end.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # gloo says there whom it has met
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        )

    def _answer(self, method: str) -> dict[str, Any]:
        try:
            answers, dead, silent = self._listen()
        except BaseException:  # an interrupt: an answer that comes later would be taken for that of the next request
            self.end()
            raise
        faults = {rank: answer for rank, answer in answers.items() if not _is_result(answer)}
        if dead or (silent and not faults) or any("error" not in fault for fault in faults.values()):
            raise self._lost(method, dead, faults, silent=silent)
        if faults:
            if silent or method == "start":
                self.end()
            raise _error(min(faults.items())[1]["error"])
        return answers[0]

    def _listen(self) -> tuple[dict[int, dict[str, Any]], set[int], tuple[int, ...]]:
        """The answers by rank, the ranks that died, and those that are silent; a failure cuts the wait for others."""
        silent, dead = dict(enumerate(self._ends)), set[int]()
        answers: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + self._seconds
        while silent and (ready := wait(silent.values(), timeout=max(0.0, deadline - time.monotonic()))):
            for rank in [rank for rank, end in silent.items() if end in ready]:
                try:
                    answers[rank] = decode(silent.pop(rank).recv_bytes())
                except (EOFError, OSError):
                    dead.add(rank)
            if dead or not all(map(_is_result, answers.values())):
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        return answers, dead, tuple(silent)

    def _lost(
        self, method: str, dead: set[int], faults: Mapping[int, Mapping[str, Any]], *, silent: tuple[int, ...] = ()
    ) -> LearnerLostError:
        """End what is left, and say which rank was lost and how."""
        reasons = [f"rank {rank} {_ending(self.processes[rank])}" for rank in sorted(dead)]
        short = {rank: fault["memory"] for rank, fault in faults.items() if "memory" in fault}
        if not reasons and short:
            reasons = [f"rank {rank} ran out of memory ({why})" for rank, why in short.items()]
        if not reasons:
            reasons = [f"rank {rank} failed: {fault['crash']}" for rank, fault in faults.items() if "crash" in fault]
        if not reasons:
            minutes = self._seconds / 60.0
            reasons = [f"rank {rank} did not answer within {minutes:g} minutes" for rank in silent]
        self.ran_out = bool(short) and not dead
        size = len(self.processes)
        self.end()
        return LearnerLostError(
            f"{'; '.join(reasons)}, in {method!r} of {size} ranks",
            where="placement",
            fix="the run goes on from its newest checkpoint, as does the same command when it is started again",
        )


def _is_result(answer: Mapping[str, Any]) -> bool:
    return not {"error", "memory", "crash"} & answer.keys()


def _ending(process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        return "closed its pipe"
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


def _error(fields: Sequence[str]) -> RlcoreError:
    name, what, where, fix = fields
    kind: type[RlcoreError] = getattr(rlcore.errors, name)
    return kind(what, where=where, fix=fix)
