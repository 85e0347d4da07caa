"""A comparison: each arm in a process of its own, in turn, round by round, so that a disturbance meets them all.

An arm is a module that ends by printing one line of JSON (:meth:`Meter.report`). Medians are of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

QUIET_LOAD = 1.5  # one-minute load average above which wall times say little
LIBRARIES = ("torch", "transformers", "trl", "peft")
Timing = Mapping[str, Any]


class Meter:
    """In an arm: what the work costs from here on. CPU seconds are of all threads of the process.

    ``bare_mib``: :func:`peak_mib` of the process before any model was made.
    """

    def __init__(self, *, bare_mib: float) -> None:
        self._bare, self._marks = bare_mib, dict[str, float]()
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def add(self, part: str, seconds: float) -> None:
        """Count CPU seconds of the work under the name of a part of it."""
        self._marks[f"{part}_cpu_seconds"] = self._marks.get(f"{part}_cpu_seconds", 0.0) + seconds

    def report(self, arm: str, **others: Any) -> None:
        """Print the timing as one line of JSON. Memory: the peak of the process, and the bare process."""
        timing = {
            "arm": arm,
            "wall_seconds": time.perf_counter() - self._wall,
            "cpu_seconds": time.process_time() - self._cpu,
            "before_mib": self._bare,
            "peak_mib": peak_mib(),
        }
        sys.stdout.write(json.dumps(timing | self._marks | others) + "\n")


def peak_mib() -> float:
    """The largest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def compare(
    arms: Mapping[str, Sequence[str]], render: Callable[[Sequence[Timing]], str], *, name: str, description: str | None
) -> int:
    """Run the arms (each the arguments after ``python -m``) by the command line's options, print their table."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--arms", nargs="+", choices=arms, default=list(arms))
    parser.add_argument("--out", type=Path, default=Path(f".rlcore/{name}.json"))
    options = parser.parse_args()
    loads, timings = [os.getloadavg()[0]], list[Timing]()
    for number in range(options.rounds):
        for arm in options.arms:
            timings.append({**run_arm(arm, arms[arm], options.threads), "round": number})
            loads.append(os.getloadavg()[0])
            sys.stderr.write(f"round {number + 1}, {arm}: {timings[-1]['cpu_seconds']:.1f} CPU s\n")
            # After each: a long measurement that is stopped keeps what it has.
            write(options.out, {"machine": machine(options.threads, loads), "timings": timings})
    sys.stdout.write(f"{describe(machine(options.threads, loads))}\n\n{render(timings)}\n\nIn full: {options.out}\n")
    return 0


def run_arm(arm: str, arguments: Sequence[str], threads: int) -> Timing:
    """One run of an arm in a process of its own."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-W", "ignore", "-m", *arguments]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True)
    if finished.returncode != 0:
        raise SystemExit(f"the arm {arm} failed:\n{finished.stderr[-2000:]}")
    timing: Timing = json.loads(finished.stdout.strip().splitlines()[-1])
    return timing


def machine(threads: int, loads: Sequence[float]) -> dict[str, Any]:
    """What was measured on. Loads: at the start and after each arm; our own process adds about one."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cpu": platform.machine(),
        "cores": os.cpu_count(),
        "threads": threads,
        "python": platform.python_version(),
        "versions": dict(filter(None, map(_version, LIBRARIES))),
        "load_at_start": loads[0],
        "highest_load": max(loads),
        "quiet": loads[0] < QUIET_LOAD and max(loads) < threads + QUIET_LOAD,
    }


def _version(name: str) -> tuple[str, str] | None:
    try:
        return name, version(name)
    except PackageNotFoundError:
        return None


def describe(where: Mapping[str, Any]) -> str:
    """The machine in a sentence."""
    versions = ", ".join(f"{name} {number}" for name, number in where["versions"].items())
    state = "quiet machine" if where["quiet"] else "BUSY machine: compare CPU seconds, not wall seconds"
    return (
        f"{where['date']}, {where['cpu']}, {where['cores']} cores, {where['threads']} thread(s), Python "
        f"{where['python']}, {versions}; load {where['load_at_start']:.1f} to {where['highest_load']:.1f} ({state})."
    )


def write(path: Path, report: Mapping[str, Any]) -> None:
    """The report as JSON, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(report, indent=1), encoding="utf-8")
    temporary.replace(path)


def by_arm(timings: Sequence[Timing]) -> dict[str, list[Timing]]:
    """The timings of each arm, in the order of the first round."""
    arms: dict[str, list[Timing]] = {}
    for timing in timings:
        arms.setdefault(timing["arm"], []).append(timing)
    return arms


def median(timings: Sequence[Timing], name: str) -> float:
    """Of one figure over the rounds."""
    return statistics.median(timing[name] for timing in timings)


def memory_mib(timings: Sequence[Timing]) -> float:
    """Median peak above the bare process: weights, gradients, optimizer, activations."""
    return statistics.median(timing["peak_mib"] - timing["before_mib"] for timing in timings)


def spread(timings: Sequence[Timing], name: str) -> str:
    """``median (lowest to highest)`` of one figure."""
    values = [timing[name] for timing in timings]
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows))
