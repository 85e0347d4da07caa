"""Work that must not grow with the square of its input: minutes of the processor tell, a second or two do not."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

LIMIT = 20.0  # seconds; on a busy machine, whose processors share caches, work takes up to five times as long


@contextmanager
def within_seconds() -> Iterator[None]:
    """Fail where the block takes ``LIMIT`` of this thread: what is tried here takes less than one, or minutes."""
    started = time.thread_time()  # not the process's: other tests may have left threads behind
    yield
    assert time.thread_time() - started < LIMIT
