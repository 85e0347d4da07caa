"""Writes that need not be waited for, made one after another by a thread of their own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

MAX_WAITING = 32  # jobs; whoever brings more waits, so that a slow server cannot fill the memory


class BackgroundWriter:
    """Does jobs in the order in which they came, while the caller goes on.

    A job that fails is the last one that is done: what was to follow it is dropped, so that nothing is ever recorded
    after a gap. Its error is raised by every later :meth:`submit` and :meth:`wait`.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="writer")  # starts with the first job
        self._pending: deque[Future[None]] = deque()
        self._error: Exception | None = None

    def submit(self, job: Callable[[], object]) -> None:
        """Do ``job`` as soon as those before it are done; waits while ``MAX_WAITING`` are."""
        if len(self._pending) >= MAX_WAITING:
            self._pending.popleft().result()
        while self._pending and self._pending[0].done():
            self._pending.popleft()
        self._raise()
        self._pending.append(self._thread.submit(self._do, job))

    def wait(self) -> None:
        """Return when every job is done."""
        while self._pending:
            self._pending.popleft().result()
        self._raise()

    def close(self) -> None:
        """Do what waits and end the thread, whether or not a job failed."""
        self._thread.shutdown(wait=True)

    def _do(self, job: Callable[[], object]) -> None:
        if self._error is not None:
            return
        try:
            job()
        except Exception as error:  # noqa: BLE001 - it is raised in the thread that waits
            self._error = error

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error
