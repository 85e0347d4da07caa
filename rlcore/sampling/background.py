"""Work in a thread that nothing waits for at the end of the process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


def in_background(work: Callable[[], Result]) -> Future[Result]:
    """The result of ``work``, which runs in a daemon thread: a peer that never answers does not hold the process."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 it is raised where the result is asked for
            future.set_exception(error)

    threading.Thread(target=run, name="weights", daemon=True).start()
    return future
