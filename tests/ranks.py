"""Ranks as forks of the test's own process, which has imported everything already."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import signal
import subprocess
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from rlcore.distributed import rank
from rlcore.distributed.local_ranks import ChildRanks
from rlcore.distributed.serialization import decode
from rlcore.hardware.sharded import Ranks, open_ranks
from tests.waiting import LONG

SECONDS = LONG


def on_ranks(size: int, work: Callable[[Ranks], Any], folder: Path, *, width: int = 1) -> list[Any]:
    """Return the results of ``work`` on ``size`` gloo ranks; raise an error of one here."""
    forks = multiprocessing.get_context("fork")
    store = f"file://{folder / f'store-{size}-{len(list(folder.iterdir()))}'}"
    ends = [forks.Pipe() for _ in range(size)]
    children = [
        forks.Process(target=_run, args=(rank, size, store, work, theirs, width))
        for rank, (_, theirs) in enumerate(ends)
    ]
    gc.freeze()  # a fork that finalizes what its parent made, such as a client with threads, can crash
    for child in children:
        child.start()
    gc.unfreeze()
    try:
        answers = [_answer(ours) for ours, _ in ends]
    finally:
        for child in children:
            child.kill()
            child.join()
    faults = [answer for answer in answers if isinstance(answer, str)]
    assert not faults, "\n".join(faults)
    return [answer for (answer,) in answers]


def _answer(end: Connection) -> Any:
    return pickle.loads(end.recv_bytes()) if end.poll(SECONDS) else "no answer"  # noqa: S301 - of our own fork


def _run(rank: int, size: int, store: str, work: Callable[[Ranks], Any], answer: Connection, width: int) -> None:
    torch.set_num_threads(1)
    try:
        with open_ranks(rank, size, store=store, device=torch.device("cpu"), timeout=SECONDS, width=width) as ranks:
            answer.send_bytes(pickle.dumps((work(ranks),)))
    except BaseException:  # noqa: BLE001 - told to the test
        answer.send_bytes(pickle.dumps(traceback.format_exc()))


class Fork:
    """A forked rank, with what the group asks of a child process."""

    def __init__(self, end: Connection) -> None:
        gc.freeze()  # as above
        self.pid = os.fork()
        if self.pid:
            gc.unfreeze()
            return
        try:
            rank.serve(end, decode(end.recv_bytes()))
        finally:
            os._exit(0)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        try:
            _, status = os.waitpid(self.pid, 0)
        except ChildProcessError:
            return self.code
        self.code = os.waitstatus_to_exitcode(status)
        return self.code


class Forks(ChildRanks):
    """Ranks that have imported everything already."""

    def launch(self, end: Connection) -> subprocess.Popen[bytes]:
        return Fork(end)  # type: ignore[return-value]
