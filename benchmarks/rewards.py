"""How fast are mathematical answers graded, with hostile ones among them, and does any process stay behind?

    python -m benchmarks.rewards [--num 5000] [--evil 0.02] [--workers 2]

Prints a Markdown table for docs/benchmarks/rewards-and-sandbox.md. An answer is a completion of a line or two;
``plain`` ones are numbers in the ways people write them, ``mixed`` adds one answer in ten that needs symbolic
mathematics. Hostile answers are all different, so that none is graded once for many; they are refused on sight or have
to be killed at the deadline.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from rlcore.rewards.math_answer import MathOptions, MathReward
from rlcore.types import Prompt, Rollout

REFUSED = ("9^{{9^{{9+{i}}}}}", "9**9**{i}", "{{" * 40 + "{i}", "{i}" + "1" * 5_000, "{i}" + "0" * 6 + "!")
KILLED = (r"(x+y+z+{i})^{{900}}", r"(a+b+c+d+{i})^{{190}}", r"\binom{{9{i}99999}}{{4{i}999}}")
SYMBOLIC = (("x+{i}+x", "2x+{i}"), (r"\sqrt{{{i}}}", r"\sqrt{{{i}}} \cdot 1"), ("[{i}, 5{i})", "[{i},5{i})"))
SURVIVOR = """
import sys
from benchmarks.rewards import completion
from rlcore.rewards.math_answer import MathOptions, MathReward
reward = MathReward(MathOptions(timeout_seconds=600.0))
reward([completion("x+x", "2x")])
print(*(worker.pid for worker in reward._pool._workers), flush=True)
reward([completion(r"\\binom{9999999}{4999999}", "5")])
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num", type=int, default=5_000)
    parser.add_argument("--evil", type=float, default=0.02)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    print(f"Machine: {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}.\n")
    print("| answers | hostile | per second | wrong verdicts | unscored | processes left |\n|---|---|---|---|---|---|")
    for name, symbolic, evil, hostile in (
        ("plain", 0.0, 0.0, REFUSED),
        ("plain", 0.0, options.evil, REFUSED),
        ("plain", 0.0, options.evil, REFUSED + KILLED),
        ("mixed", 0.1, options.evil, REFUSED),
    ):
        rows = make_rows(options.num, symbolic=symbolic, evil=evil, hostile=hostile)
        kind = "none" if not evil else f"{evil:.0%}, {'refused' if hostile is REFUSED else 'refused and killed'}"
        print(f"| {name} | {kind} | " + measure(rows, num_workers=options.workers))
    print(f"\nProcesses left after SIGKILL of the caller, one inside a computation: {left_after_a_kill()}.")
    return 0


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


def measure(rows: Sequence[tuple[Rollout, float]], *, num_workers: int) -> str:
    """Grade ``rows`` in batches of 512, the processes warm, and count what was wrong and what is left."""
    reward = MathReward(MathOptions(evaluated_only=False, num_workers=num_workers))
    reward([completion("x+x", "2x")])
    started, scores = time.perf_counter(), []
    for start in range(0, len(rows), 512):
        scores += reward([rollout for rollout, _ in rows[start : start + 512]])
    seconds = time.perf_counter() - started
    workers = [process.pid for process in psutil.Process().children(recursive=True)]
    reward.close()
    wrong = sum(s.value not in (value, None) for (_, value), s in zip(rows, scores, strict=True))
    unscored = sum(score.value is None for score in scores)
    return f"{len(rows) / seconds:,.0f} | {wrong} | {unscored} | {len(alive(workers))} of {len(workers)} |"


def left_after_a_kill() -> str:
    """Kill a process that is grading and see which of its graders live on."""
    root = Path(__file__).resolve().parents[1]
    caller = subprocess.Popen([sys.executable, "-c", SURVIVOR], cwd=root, stdout=subprocess.PIPE, text=True)
    assert caller.stdout is not None
    caller.stdout.readline()
    time.sleep(1.0)
    pids = [child.pid for child in psutil.Process(caller.pid).children(recursive=True)]
    os.kill(caller.pid, signal.SIGKILL)
    caller.wait()
    return f"{len(alive(pids))} of {len(pids)}"


def alive(pids: Sequence[int], seconds: float = 5.0) -> list[int]:
    """Those of ``pids`` that still run after a grace period."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(psutil.pid_exists(pid) for pid in pids):
        time.sleep(0.02)
    return [pid for pid in pids if psutil.pid_exists(pid)]


if __name__ == "__main__":
    sys.exit(main())
