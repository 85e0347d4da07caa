"""Timeouts for calls of user code."""

from __future__ import annotations

import contextvars
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from queue import SimpleQueue
from types import FrameType
from typing import Any, TypeVar

from rlcore.errors import CallTimeoutError

T = TypeVar("T")

_SIGNAL = signal.SIGUSR2  # user code may use SIGALRM itself


@dataclass(frozen=True, kw_only=True, slots=True)
class CallTimeout:
    """Timeout of a call of user code, with its error's text.

    Attributes:
        name: Name of the code in the error: "the reward function brief".
        setting: Key that sets the timeout.
    """

    seconds: float
    name: str
    where: str = ""
    setting: str

    def run(self, call: Callable[[], T], *, thread: WorkerThread | None = None) -> T:
        """Return the result of ``call``. The main thread runs it itself and is interrupted by a signal.

        Other threads run it in ``thread``, by default a new one.

        Raises:
            CallTimeoutError: It timed out.
        """
        if threading.current_thread() is not threading.main_thread():
            return self.run_in_thread(call, thread)

        def interrupt(_: int, __: FrameType | None) -> None:
            raise _TooLateError

        main = threading.main_thread().ident
        assert main is not None
        timer = threading.Timer(self.seconds, signal.pthread_kill, (main, _SIGNAL))
        timer.daemon = True
        before = signal.signal(_SIGNAL, interrupt)
        try:
            timer.start()  # its signal may come at once
            try:
                return call()
            finally:
                timer.cancel()
                timer.join()  # else its signal could arrive later
        except _TooLateError:
            raise self._error() from None
        finally:
            signal.signal(_SIGNAL, before)

    def run_in_thread(self, call: Callable[[], T], thread: WorkerThread | None = None) -> T:
        """Run ``call`` in another thread, with the caller's context and number of threads.

        Raises:
            CallTimeoutError: It timed out.
        """
        torch, context = sys.modules.get("torch"), contextvars.copy_context()
        threads = torch.get_num_threads() if torch else 0

        def work() -> T:
            if torch:  # the default of a new thread would change the last bits of results
                torch.set_num_threads(threads)
            return context.run(call)

        worker = thread or WorkerThread(f"timeout of {self.name}")
        try:
            return worker.call(work, self.seconds)
        except _TooLateError:
            raise self._error() from None
        finally:
            if thread is None:
                worker.end()

    def _error(self) -> CallTimeoutError:
        return CallTimeoutError(
            f"{self.name} timed out after {self.seconds:g} s",
            where=self.where,
            fix=f"raise {self.setting}, or find what blocks it; the same command resumes from the newest checkpoint",
        )


class WorkerThread:
    """A thread that runs one call after another, for thread-bound objects such as SQLite connections.

    A thread cannot be killed. One that timed out is abandoned and replaced; it ends with the process.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] | None = None

    def call(self, call: Callable[[], T], seconds: float) -> T:
        """Return the result of ``call`` or raise its error; raise :class:`_TooLateError` after ``seconds``."""
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
        if self._calls is not None:
            self._calls.put(None)
            self._calls = None


def _work(calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]) -> None:
    while item := calls.get():
        done, call = item
        try:
            done.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised in the waiting thread
            done.set_exception(error)


class _TooLateError(BaseException):
    """Timeout; no ``Exception``, which user code may catch."""
