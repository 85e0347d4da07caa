"""The grader processes: deadlines hold, failures stay single, and nothing is left running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rlcore.errors import RewardError
from rlcore.rewards import grader_pool
from rlcore.rewards.grader_pool import GraderPool
from tests.waiting import LONG, until, until_ended

ROOT = Path(__file__).parents[3]
ENDLESS = {"pattern": "(a|a)*b", "text": "a" * 60}  # 2^60 ways to fail, in one C function
BAD_PATTERN = {"pattern": "(", "text": ""}


def same(name: str) -> dict[str, str]:
    return {"pattern": name, "text": name}


@pytest.fixture(scope="module")
def pool() -> Iterator[GraderPool]:
    with GraderPool("format", timeout_seconds=0.5, num_workers=2) as pool:
        yield pool


def processes(pool: GraderPool) -> list[int]:
    workers = [worker.pid for worker in pool._workers]
    return [*workers, psutil.Process(workers[0]).ppid()]


def until_busy(pids: list[int]) -> None:
    def used(pid: int) -> float:
        return float(psutil.Process(pid).cpu_times().user)

    before = {pid: used(pid) for pid in pids}
    until(lambda: all(used(pid) >= before[pid] + 0.1 for pid in pids), "work")


def test_outcomes_come_in_the_order_of_the_requests(pool: GraderPool) -> None:
    requests = [{"pattern": str(i), "text": str(i - i % 2)} for i in range(12)]
    assert [outcome.value for outcome in pool.grade_all(requests)] == [i % 2 == 0 for i in range(12)]


def test_each_failure_stays_with_its_request(pool: GraderPool) -> None:
    outcomes = pool.grade_all([same("x"), ENDLESS, BAD_PATTERN, same("y"), same("z")])
    assert [outcome.value for outcome in outcomes] == [True, None, None, True, True]
    assert "longer than" in outcomes[1].error
    assert "unterminated" in outcomes[2].error
    assert [outcome.is_of_answer for outcome in outcomes] == [False, True, False, False, False]


def test_time_is_processor_time_and_a_worker_that_only_waits_is_an_error_of_the_grader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request = {"pattern": "x", "text": "x"}
    with GraderPool("format", timeout_seconds=5.0, num_workers=1) as pool:
        pool.grade_all([request])
        monkeypatch.setattr(grader_pool, "_IDLE_SECONDS", 0.3)
        os.kill(pool._workers[0].pid, signal.SIGSTOP)
        outcomes = pool.grade_all([request])
    assert (outcomes[0].value, outcomes[0].is_of_answer) == (None, False)
    assert "neither answered" in outcomes[0].error


@pytest.mark.parametrize("text", ["\U0001f600" * 100_000, "\0" * 100_000, "\ud800" * 1_000])
def test_a_text_of_any_characters_reaches_its_grader(text: str) -> None:
    with GraderPool("format", timeout_seconds=5.0, num_workers=1) as pool:
        assert pool.grade_all([{"pattern": "(?s).*", "text": text}])[0].value is True


def test_equal_requests_are_graded_once(pool: GraderPool) -> None:
    """Twenty endless searches cost one of the two workers its life; each on its own, they would cost both."""
    pool.grade_all([same("x"), same("y")])
    before = {worker.pid for worker in pool._workers}
    outcomes = pool.grade_all([ENDLESS] * 20)
    assert len({outcome.error for outcome in outcomes}) == 1
    assert len(before & {worker.pid for worker in pool._workers}) == 1


def test_a_worker_that_dies_costs_one_answer() -> None:
    with GraderPool("format", timeout_seconds=LONG, num_workers=2) as pool:
        pool.grade_all([same("x")])
        workers = [worker.pid for worker in pool._workers]

        def kill() -> None:
            until_busy(workers)
            for pid in workers:
                os.kill(pid, signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        outcomes = pool.grade_all([ENDLESS, ENDLESS | {"text": "a" * 61}, same("x")])
        killer.join()
    assert ["died" in outcome.error for outcome in outcomes] == [True, True, False]
    assert not any(outcome.is_of_answer for outcome in outcomes)
    assert outcomes[2].value is True


def test_a_worker_that_died_while_idle_costs_one_answer(pool: GraderPool) -> None:
    pool.grade_all([same("x")])
    os.kill(pool._workers[0].pid, signal.SIGKILL)
    until_ended([pool._workers[0].pid])
    outcomes = pool.grade_all([same(name) for name in "wxyz"])
    assert sorted(outcome.error for outcome in outcomes)[-2:] == ["", "the grader died on this answer"]
    assert [outcome.value for outcome in outcomes].count(True) == 3


def test_when_their_parent_dies_the_batch_has_errors_and_the_next_one_starts_anew() -> None:
    with GraderPool("format", timeout_seconds=0.3, num_workers=1) as pool:
        pool.grade_all([same("x")])
        worker, parent = processes(pool)
        os.kill(parent, signal.SIGKILL)
        lost = pool.grade_all([ENDLESS, same("x")])
        assert [outcome.value for outcome in lost] == [None, None]
        assert pool.grade_all([same("y")])[0].value is True
    # Nobody was left to kill the worker: its own limit of CPU time does.
    until_ended([worker, parent])


def test_closing_leaves_no_process_and_so_does_dropping_the_pool() -> None:
    pool = GraderPool("format", timeout_seconds=0.3, num_workers=2)
    pool.grade_all([ENDLESS, same("x")])
    pids = processes(pool)
    pool.close()
    until_ended(pids)
    pool.grade_all([same("x")])
    pids = processes(pool)
    del pool
    until_ended(pids)


def test_killing_the_caller_ends_every_process() -> None:
    """SIGKILL runs no handler: the closed control socket is what tells them. One worker is inside a C function."""
    program = (
        "from rlcore.rewards.grader_pool import GraderPool\n"
        "pool = GraderPool('format', timeout_seconds=600.0, num_workers=1)\n"
        "pool.grade_all([{'pattern': 'x', 'text': 'x'}])\n"
        "print(*(worker.pid for worker in pool._workers), flush=True)\n"
        "pool.grade_all([{'pattern': '(a|a)*b', 'text': 'a' * 60}])\n"
    )
    caller = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert caller.stdout is not None
    workers = [int(pid) for pid in caller.stdout.readline().split()]
    until_busy(workers)
    pids = [child.pid for child in psutil.Process(caller.pid).children(recursive=True)]
    assert set(workers) < set(pids)
    caller.kill()
    caller.wait()
    caller.stdout.close()
    until_ended(pids)


def test_threads_take_turns(pool: GraderPool) -> None:
    results: dict[str, list[bool]] = {}

    def work(name: str) -> None:
        requests = [same(name) | {"text": name * times} for times in (2, 1, 3)]
        results[name] = [outcome.value for outcome in pool.grade_all(requests)]

    threads = [threading.Thread(target=work, args=(name,)) for name in "wxyz"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {name: [False, True, False] for name in "wxyz"}


def test_workers_have_a_memory_limit_and_none_of_our_environment(pool: GraderPool) -> None:
    pool.grade_all([same("x")])
    worker = psutil.Process(pool._workers[0].pid)
    assert worker.rlimit(psutil.RLIMIT_AS) == (2 << 30, 2 << 30)
    threads = {"OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"}
    known = {"PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHASHSEED", "LANG", "LC_CTYPE"} | threads
    assert worker.environ().keys() <= known
    assert os.environ.keys() - known  # there is something to keep back


def test_a_grader_that_cannot_start_is_an_error_with_the_reason() -> None:
    with pytest.raises(RewardError, match="did not start: KeyError"):
        GraderPool("alchemy", timeout_seconds=1.0, num_workers=1).grade_all([same("x")])


def test_a_request_beyond_one_mebibyte_is_refused(pool: GraderPool) -> None:
    with pytest.raises(RewardError, match="larger than 1 MiB"):
        pool.grade_all([{"pattern": "x", "text": "y" * (1 << 20)}])
