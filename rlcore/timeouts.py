"""Calls of code that is not ours, with a deadline and a name for what does not come back."""

from __future__ import annotations

import contextvars
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from queue import SimpleQueue
from types import FrameType
from typing import Any, TypeVar

import torch

from rlcore.errors import CallTimeoutError

T = TypeVar("T")

_SIGNAL = signal.SIGUSR2  # an alarm is what foreign code sets itself


@dataclass(frozen=True, kw_only=True, slots=True)
class CallTimeout:
    """When foreign code has to be back, and what is said when it is not.

    ``seconds``: of one call. ``name``: what the code is, in the error: "the reward function brief". ``where``: what it
    was asked about. ``setting``: the key that sets the deadline.
    """

    seconds: float
    name: str
    where: str = ""
    setting: str

    def run(self, call: Callable[[], T], *, aside: WorkerThread | None = None) -> T:
        """What ``call`` gives. In the main thread it stays there, because signals work nowhere else.

        From any other thread it goes ``aside``, by default to a thread of its own.

        Raises:
            DeadlineError: it was not back in time.
        """
        if threading.current_thread() is not threading.main_thread():
            return self.run_in_thread(call, aside)

        def interrupt(_: int, __: FrameType | None) -> None:
            raise _TooLateError

        main = threading.main_thread().ident
        assert main is not None
        timer = threading.Timer(self.seconds, signal.pthread_kill, (main, _SIGNAL))
        timer.daemon = True
        before = signal.signal(_SIGNAL, interrupt)
        timer.start()
        try:
            try:
                return call()
            finally:
                timer.cancel()
                timer.join()  # else its signal could come when nobody waits for it
        except _TooLateError:
            raise self._error() from None
        finally:
            signal.signal(_SIGNAL, before)

    def run_in_thread(self, call: Callable[[], T], thread: WorkerThread | None = None) -> T:
        """What ``call`` gives in another thread, by default one of its own, with the caller's context and threads.

        Raises:
            DeadlineError: it was not back in time.
        """
        threads, context = torch.get_num_threads(), contextvars.copy_context()

        def work() -> T:
            torch.set_num_threads(threads)  # a new thread has the machine's default, which would change last bits
            return context.run(call)

        worker = thread or WorkerThread(f"deadline of {self.name}")
        try:
            return worker.call(work, self.seconds)
        except _TooLateError:
            raise self._error() from None
        finally:
            if thread is None:
                worker.end()

    def _error(self) -> CallTimeoutError:
        return CallTimeoutError(
            f"{self.name} has not come back after {self.seconds:g} s",
            where=self.where,
            fix=f"look for what it waits for, or raise {self.setting}; "
            "the same command goes on from the newest checkpoint",
        )


class WorkerThread:
    """A thread that makes one call after another: what belongs to a thread, as SQLite's connections do, stays usable.

    A thread cannot be ended. One that does not come back is left behind, and another takes its place; it ends with the
    process.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] | None = None

    def call(self, call: Callable[[], T], seconds: float) -> T:
        """What ``call`` gives; raises what it raises, and :class:`_TooLateError` where it was not back in time."""
        if self._calls is None:
            self._calls = SimpleQueue()
            threading.Thread(target=_work, args=(self._calls,), name=self._name, daemon=True).start()
        done: Future[T] = Future()
        self._calls.put((done, call))
        if not wait([done], seconds).done:
            self.end()
            raise _TooLateError
        return done.result()

    def end(self) -> None:
        """Let the thread go when it has come back."""
        if self._calls is not None:
            self._calls.put(None)
            self._calls = None


def _work(calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]) -> None:
    while asked := calls.get():
        done, call = asked
        try:
            done.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
            done.set_exception(error)


class _TooLateError(BaseException):
    """The time is up. Foreign code that catches every ``Exception`` does not catch this."""
