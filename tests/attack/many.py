"""Many programs and answers, 5 % of them hostile: how many verdicts are wrong, and what is left afterwards?

    python -m tests.attack.many [--programs 10000] [--answers 100000] [--workers 2]

Prints a Markdown table for docs/benchmarks/rewards-and-sandbox.md. The programs are those of
tests/rlcore/sandbox/test_crowds.py, the answers those of benchmarks/rewards.py, one in ten symbolic. What is left:
processes that still run, and descriptors of this process that were not open before.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import psutil

from benchmarks.rewards import KILLED, REFUSED, alive, make_rows
from rlcore.rewards.math_answer import MathOptions, MathReward
from rlcore.sandbox.base import Verdict
from rlcore.sandbox.pool import Job, SandboxPool
from rlcore.types import Rollout
from tests.rlcore.sandbox.test_crowds import jobs

BATCH, HOSTILE = 512, 0.05
Item = TypeVar("Item")
Verdicts = list[tuple[bool, bool]]  # whether it is wrong, whether it is missing


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=10_000)
    parser.add_argument("--answers", type=int, default=100_000)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    print(f"Machine: {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}.\n")
    print("| what | hostile | per second | wrong verdicts | unscored | processes left | descriptors left |")
    print("|---|---|---|---|---|---|---|")
    programs = list(jobs(options.programs))
    rows = make_rows(options.answers, symbolic=0.1, evil=HOSTILE, hostile=REFUSED + KILLED)
    num_hostile = sum(right is None for _, right in programs)
    print(f"| {len(programs):,} programs | {num_hostile:,} |", programs_judged(programs, options.workers), flush=True)
    print(f"| {len(rows):,} answers | {HOSTILE * len(rows):,.0f} |", answers_graded(rows, options.workers), flush=True)
    return 0


def programs_judged(expected: Sequence[tuple[Job, bool | None]], num_workers: int) -> str:
    """The cells of the table for programs, with whether each is right; a hostile one (None) has to be wrong."""
    pool = SandboxPool(num_workers=num_workers)

    def judge(batch: Sequence[tuple[Job, bool | None]]) -> Verdicts:
        found = pool.check_all([job for job, _ in batch])
        passed = [all(one.verdict is Verdict.PASS for one in each) for each in found]
        missing = [any(one.verdict is Verdict.INFRA for one in each) for each in found]
        return [(was is not bool(right), gone) for was, gone, (_, right) in zip(passed, missing, batch, strict=True)]

    return _measured(pool, judge, expected)


def answers_graded(rows: Sequence[tuple[Rollout, float]], num_workers: int) -> str:
    """The cells of the table for answers, each with its reward."""
    reward = MathReward(MathOptions(evaluated_only=False, num_workers=num_workers))

    def judge(batch: Sequence[tuple[Rollout, float]]) -> Verdicts:
        scores = reward([rollout for rollout, _ in batch])
        return [(s.value not in (value, None), s.value is None) for s, (_, value) in zip(scores, batch, strict=True)]

    return _measured(reward, judge, rows)


def _measured(
    grader: SandboxPool | MathReward, judge: Callable[[Sequence[Item]], Verdicts], items: Sequence[Item]
) -> str:
    """Judge everything in batches, close the grader, and count."""
    before = psutil.Process().num_fds()
    started, verdicts = time.perf_counter(), Verdicts()
    for batch in _batches(items):
        verdicts += judge(batch)
        print(f"{len(verdicts)} of {len(items)}", file=sys.stderr, flush=True)
    seconds = time.perf_counter() - started
    below = [process.pid for process in psutil.Process().children(recursive=True)]
    grader.close()
    wrong, missing = sum(bad for bad, _ in verdicts), sum(gone for _, gone in verdicts)
    left = psutil.Process().num_fds() - before
    return f"{len(items) / seconds:,.0f} | {wrong} | {missing} | {len(alive(below))} of {len(below)} | {left} |"


def _batches(items: Sequence[Item]) -> Iterator[Sequence[Item]]:
    return (items[start : start + BATCH] for start in range(0, len(items), BATCH))


if __name__ == "__main__":
    sys.exit(main())
