"""What a box costs: processor time of one and of two, and programs judged per second. Prints a table.

Processor time is that of everything a program takes: what a supervisor does, bwrap and the processes in the box, from
the kernel's account of this process and of the children that it waited for. The time of a process that was killed
inside a box is in nobody's account, so here boxes end by themselves, which costs no less.
"""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable

from rlcore.sandbox import judge
from rlcore.sandbox.base import Limits, Verdict
from rlcore.sandbox.box import Box
from rlcore.sandbox.image import box_image
from rlcore.sandbox.pool import Job, SandboxPool
from rlcore.sandbox.suite import Suite, parse_suite
from rlcore.sandbox.supervisor import become_subreaper
from rlcore.sandbox.walls import Walls

NUM_RUNS = 100
NUM_JOBS = 200
LIMITS = Limits(wall_seconds=20.0)
RIGHT, WRONG = "def double(x): return 2 * x", "def double(x): return x"
CALL = {"style": "call", "entry_point": "double", "tests": [{"args": [2], "output": 4}]}
ASSERT = {"style": "assert", "entry_point": "double", "tests": ["assert double(2) == 4"]}


def main() -> None:
    """Measure and print."""
    print("| what | processor time |\n|---|---|")
    print(f"| bare `python -I -S -B` | {_milliseconds(_bare):.1f} ms |")
    walls = Walls(bwrap=shutil.which("bwrap") or sys.exit("bubblewrap is missing"), image=str(box_image() / "root"))
    become_subreaper()
    judge.Box = GentleBox  # type: ignore[attr-defined]  # for the measurement, in this process alone
    for name, reference in (("one box, a call", CALL), ("two boxes, an assertion", ASSERT)):
        suite = parse_suite(json.dumps(reference))
        print(f"| {name} | {_milliseconds(_checker(walls, suite)):.1f} ms |")
    for name, reference in (("calls", CALL), ("assertions", ASSERT)):
        rate, wrong = _throughput(json.dumps(reference))
        print(f"\n{name}, 2 workers: {rate:.1f} programs per second, {wrong} of {NUM_JOBS} judged wrongly")


def _bare() -> None:
    subprocess.run([sys.executable, "-I", "-S", "-B", "-c", "pass"], check=True)


def _checker(walls: Walls, suite: Suite) -> Callable[[], object]:
    return lambda: judge.check_program(walls, suite, RIGHT, LIMITS, stop_early=True)


class GentleBox(Box):
    """A box that is told to end, and whose processes are all waited for."""

    def _end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        super()._end()


def _milliseconds(run: Callable[[], object]) -> float:
    run()  # files in the page cache
    before = _processor_seconds()
    for _ in range(NUM_RUNS):
        run()
    return 1000.0 * (_processor_seconds() - before) / NUM_RUNS


def _processor_seconds() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _throughput(reference: str) -> tuple[float, int]:
    codes = [(RIGHT, WRONG)[number % 2] for number in range(NUM_JOBS)]
    with SandboxPool(num_workers=2) as pool:
        pool.run("pass")
        start = time.monotonic()
        outcomes = pool.check_all([Job(reference=reference, code=f"{code}  # {n}") for n, code in enumerate(codes)])
        seconds = time.monotonic() - start
    right = [(one.verdict is Verdict.PASS) == (code == RIGHT) for (one,), code in zip(outcomes, codes, strict=True)]
    return NUM_JOBS / seconds, right.count(False)


if __name__ == "__main__":
    main()
