from __future__ import annotations

import threading
import time
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.tasks.store.background import MAX_WAITING, BackgroundWriter
from tests.waiting import LONG


@pytest.fixture
def writer() -> BackgroundWriter:
    return BackgroundWriter()


def test_jobs_are_done_in_their_order_by_another_thread(writer: BackgroundWriter) -> None:
    done: list[tuple[int, int]] = []
    for number in range(100):
        writer.submit(lambda number=number: done.append((number, threading.get_ident())))
    writer.wait()
    assert [number for number, _ in done] == list(range(100))
    (thread,) = {thread for _, thread in done}
    assert thread != threading.get_ident()


def test_the_caller_goes_on_while_a_job_works_and_waits_when_too_many_do(writer: BackgroundWriter) -> None:
    may_go = threading.Event()
    try:
        for _ in range(MAX_WAITING):
            writer.submit(may_go.wait)  # none of them is done before may_go
        one_more = threading.Thread(target=partial(writer.submit, may_go.wait))
        one_more.start()
        one_more.join(0.2)
        assert one_more.is_alive()
    finally:
        may_go.set()
    one_more.join(LONG)
    assert not one_more.is_alive()
    writer.wait()


@given(st.integers(1, 20), st.integers(0, 19))
def test_after_a_job_that_failed_nothing_is_written_and_every_call_says_why(count: int, broken: int) -> None:
    writer, done = BackgroundWriter(), []

    def job(number: int) -> None:
        if number == broken:
            raise OSError("the server is gone")
        done.append(number)

    def submit_all() -> None:
        for number in range(count):
            writer.submit(partial(job, number))
        writer.wait()

    if broken >= count:
        submit_all()
        assert done == list(range(count))
        return
    with pytest.raises(OSError, match="the server is gone"):
        submit_all()
    for call in (partial(writer.submit, partial(job, -1)), writer.wait):
        with pytest.raises(OSError, match="the server is gone"):
            call()
    writer.close()  # ends the thread all the same
    assert done == list(range(broken))


def test_closing_does_what_waits_first(writer: BackgroundWriter) -> None:
    done: list[int] = []
    writer.submit(partial(time.sleep, 0.1))
    writer.submit(partial(done.append, 1))
    writer.close()
    assert done == [1]
