"""Background writes, done in order by one thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

MAX_WAITING = 32  # jobs; more block the caller, so that a slow server cannot fill the memory


class BackgroundWriter:
    """Run jobs in order while the caller continues.

    After a job fails, the later ones are dropped, so that records have no gap. Each later :meth:`submit` and
    :meth:`wait` raises its error.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="writer")  # starts with the first job
        self._pending: deque[Future[None]] = deque()
        self._error: Exception | None = None

    def submit(self, job: Callable[[], object]) -> None:
        """Queue ``job``; block while ``MAX_WAITING`` are queued."""
        if len(self._pending) >= MAX_WAITING:
            self._pending.popleft().result()
        while self._pending and self._pending[0].done():
            self._pending.popleft()
        self._raise()
        self._pending.append(self._thread.submit(self._do, job))

    def wait(self) -> None:
        """Wait until all jobs are done."""
        while self._pending:
            self._pending.popleft().result()
        self._raise()

    def close(self) -> None:
        """Finish the queued jobs and end the thread, even if a job failed."""
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
