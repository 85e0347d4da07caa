"""Calls of code that is not ours, with a deadline and a name for what does not come back."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import TypeVar

import torch

from rlcore.errors import DeadlineError

T = TypeVar("T")


def within(seconds: float, call: Callable[[], T], *, name: str, where: str = "", setting: str) -> T:
    """What ``call`` gives; it runs in a thread of its own, with the caller's context and number of threads.

    A thread cannot be ended. One that does not come back is left behind, and ends with the process.

    Args:
        seconds: after which it has to be back.
        call: the foreign code.
        name: what it is, in the error: "the reward function brief".
        where: what it was asked about.
        setting: the key that sets the deadline.

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

    thread = threading.Thread(target=work, name=f"deadline of {name}", daemon=True)
    thread.start()
    thread.join(seconds)
    if faults:
        raise faults[0]
    if not results:
        raise DeadlineError(
            f"{name} has not come back after {seconds:g} s",
            where=where,
            fix=f"look for what it waits for, or raise {setting}; the same command goes on from the newest checkpoint",
        )
    return results[0]
