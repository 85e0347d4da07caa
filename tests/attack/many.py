"""Many programs and answers, 5 % of them hostile: how many verdicts are wrong, and what is left afterwards?

    python -m tests.attack.many [--programs 10000] [--answers 100000] [--workers 2]

Prints a Markdown table for docs/benchmarks/checks.md. The programs are those of
tests/rlcore/sandbox/test_crowds.py, one answer in ten is symbolic. What is left:
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

from rlcore.rewards.math_answer import MathOptions, MathReward
from rlcore.sandbox.base import RunStatus
from rlcore.sandbox.pool import Job, SandboxPool
from rlcore.types import Prompt, Rollout
from tests.rlcore.sandbox.test_crowds import jobs

BATCH, HOSTILE = 512, 0.05
REFUSED = ("9^{{9^{{9+{i}}}}}", "9**9**{i}", "{{" * 40 + "{i}", "{i}" + "1" * 5_000, "{i}" + "0" * 6 + "!")
KILLED = (r"(x+y+z+{i})^{{900}}", r"(a+b+c+d+{i})^{{190}}", r"\binom{{9{i}99999}}{{4{i}999}}")
SYMBOLIC = (("x+{i}+x", "2x+{i}"), (r"\sqrt{{{i}}}", r"\sqrt{{{i}}} \cdot 1"), ("[{i}, 5{i})", "[{i},5{i})"))
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
        passed = [all(one.status is RunStatus.PASS for one in each) for each in found]
        missing = [any(one.status is RunStatus.INFRA for one in each) for each in found]
        return [(was is not bool(right), gone) for was, gone, (_, right) in zip(passed, missing, batch, strict=True)]

    return _measured(pool, judge, expected)


def answers_graded(rows: Sequence[tuple[Rollout, float]], num_workers: int) -> str:
    """The cells of the table for answers, each with its reward."""
    reward = MathReward(MathOptions(evaluated_only=False, num_workers=num_workers))

    def judge(batch: Sequence[tuple[Rollout, float]]) -> Verdicts:
        scores = reward([rollout for rollout, _ in batch])
        return [(s.value not in (value, None), s.value is None) for s, (_, value) in zip(scores, batch, strict=True)]

    return _measured(reward, judge, rows)


def completion(answer: str, reference: str) -> Rollout:
    """A completion that boxes ``answer``."""
    return Rollout(
        prompt=Prompt(prompt_id="p", messages=(), token_ids=(1,), reference=reference, task="bench"),
        completion_ids=(1,),
        sampler_logprobs=(0.0,),
        loss_mask=(True,),
        policy_version=0,
        finish_reason="stop",
        text=rf"Add them up, step by step. So the answer is \boxed{{{answer}}}.",
    )


def make_rows(num: int, *, symbolic: float, evil: float, hostile: Sequence[str]) -> list[tuple[Rollout, float]]:
    """Completions with the values that they deserve; half of the plain ones are right."""
    rows = []
    for i in range(num):
        if evil and i % round(1 / evil) == 0:
            rows.append((completion(hostile[i // round(1 / evil) % len(hostile)].format(i=i + 1), "5"), 0.0))
        elif symbolic and i % round(1 / symbolic) == 1:
            answer, reference = (text.format(i=i + 2) for text in SYMBOLIC[i // round(1 / symbolic) % len(SYMBOLIC)])
            rows.append((completion(answer, reference), 1.0))
        else:
            written = (f"{i}", f"{i:,}", f"{i}.0", rf"{i}\text{{ cm}}", f"${i}$", rf"\frac{{{i}}}{{1}}")[i % 6]
            rows.append((completion(written, str(i + i // 6 % 2)), float(i // 6 % 2 == 0)))
    return rows


def alive(pids: Sequence[int], seconds: float = 5.0) -> list[int]:
    """Those of ``pids`` that still run after a grace period."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(psutil.pid_exists(pid) for pid in pids):
        time.sleep(0.02)
    return [pid for pid in pids if psutil.pid_exists(pid)]


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
