"""Calls of code that is not ours, with a deadline and a name for what does not come back."""

from __future__ import annotations

import contextvars
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import TypeVar

import torch

from rlcore.errors import DeadlineError

T = TypeVar("T")

_SIGNAL = signal.SIGUSR2  # an alarm is what foreign code sets itself, math-verify for one


@dataclass(frozen=True, kw_only=True, slots=True)
class Deadline:
    """When foreign code has to be back, and what is said when it is not.

    ``seconds``: of one call. ``name``: what the code is, in the error: "the reward function brief". ``where``: what it
    was asked about. ``setting``: the key that sets the deadline.
    """

    seconds: float
    name: str
    where: str = ""
    setting: str

    def within(self, call: Callable[[], T]) -> T:
        """What ``call`` gives. In the main thread it stays there, because signals work nowhere else.

        Raises:
            DeadlineError: it was not back in time.
        """
        if threading.current_thread() is not threading.main_thread():
            return self.aside(call)

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

    def aside(self, call: Callable[[], T]) -> T:
        """What ``call`` gives in a thread of its own, with the caller's context and number of threads.

        A thread cannot be ended. One that does not come back is left behind, and ends with the process.

        Raises:
            DeadlineError: it was not back in time.
        """
        results: list[T] = []
        faults: list[BaseException] = []
        threads, context = torch.get_num_threads(), contextvars.copy_context()

        def work() -> None:
            torch.set_num_threads(threads)  # a new thread has the machine's default, which would change last bits
            try:
                results.append(context.run(call))
            except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
                faults.append(error)

        thread = threading.Thread(target=work, name=f"deadline of {self.name}", daemon=True)
        thread.start()
        thread.join(self.seconds)
        if faults:
            raise faults[0]
        if not results:
            raise self._error()
        return results[0]

    def _error(self) -> DeadlineError:
        return DeadlineError(
            f"{self.name} has not come back after {self.seconds:g} s",
            where=self.where,
            fix=f"look for what it waits for, or raise {self.setting}; "
            "the same command goes on from the newest checkpoint",
        )


class _TooLateError(BaseException):
    """The time is up. Foreign code that catches every ``Exception`` does not catch this."""
