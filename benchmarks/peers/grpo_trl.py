"""How long does one GRPO step take, in TRL and here? The work is described in :mod:`benchmarks.peers.work`.

    make bench-grpo        (python -m benchmarks.peers.grpo_trl [--rounds 3] [--threads 1] [--arms ...] [--out file])

Each arm runs in a process of its own, the arms in turn, round by round, so that a disturbance meets all of them. Prints
a Markdown table of medians with the machine, the versions and the load, and writes every single timing as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

ARMS = {
    "ours": ("benchmarks.peers.arm_ours",),
    "trl-tuned": ("benchmarks.peers.arm_trl", "trl-tuned"),
    "trl-defaults": ("benchmarks.peers.arm_trl", "trl-defaults"),
}
QUIET_LOAD = 1.5  # one-minute load average above which wall times say little


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--out", type=Path, default=Path(".rlcore/bench-grpo.json"))
    options = parser.parse_args()
    loads, timings = [os.getloadavg()[0]], []
    for number in range(options.rounds):
        for arm in options.arms:
            timings.append(_run(arm, options.threads) | {"round": number})
            loads.append(os.getloadavg()[0])
            sys.stderr.write(f"round {number + 1}, {arm}: {timings[-1]['cpu_seconds']:.1f} CPU s\n")
            report = {"machine": _machine(options.threads, loads), "timings": timings}
            _write(options.out, report)  # after each: a long measurement that is stopped keeps what it has
    sys.stdout.write(render(report) + f"\n\nEvery timing: {options.out}\n")
    return 0


def _run(arm: str, threads: int) -> dict[str, Any]:
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-W", "ignore", "-m", *ARMS[arm]]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True)
    if finished.returncode != 0:
        raise SystemExit(f"the arm {arm} failed:\n{finished.stderr[-2000:]}")
    timing: dict[str, Any] = json.loads(finished.stdout.strip().splitlines()[-1])
    return timing


def _machine(threads: int, loads: Sequence[float]) -> dict[str, Any]:
    # At the start and after each arm: our own process adds about one to what is there besides.
    return {
        "cpu": platform.machine(),
        "cores": os.cpu_count(),
        "threads": threads,
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("torch", "transformers", "trl")},
        "load_at_start": loads[0],
        "highest_load": max(loads),
        "quiet": loads[0] < QUIET_LOAD and max(loads) < threads + QUIET_LOAD,
    }


def _write(path: Path, report: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(report, indent=1), encoding="utf-8")
    temporary.replace(path)


def render(report: Mapping[str, Any]) -> str:
    """The medians as a Markdown table, with what they were measured on."""
    machine, timings = report["machine"], report["timings"]
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    state = "quiet machine" if machine["quiet"] else "BUSY machine: compare CPU seconds, not wall seconds"
    lines = [
        f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} thread(s), Python {machine['python']}, "
        f"{versions}; load {machine['load_at_start']:.1f} to {machine['highest_load']:.1f} ({state}).",
        "",
        "| arm | n | wall s | CPU s (range) | of it generation | peak MiB above the start | completion tokens |",
        "|---|---|---|---|---|---|---|",
    ]
    arms = dict.fromkeys(timing["arm"] for timing in timings)
    lines += [_row(arm, [timing for timing in timings if timing["arm"] == arm]) for arm in arms]
    return "\n".join(lines)


def _row(arm: str, timings: Sequence[Mapping[str, Any]]) -> str:
    def median(name: str) -> float:
        return statistics.median(timing[name] for timing in timings)

    cpu = [timing["cpu_seconds"] for timing in timings]
    memory = statistics.median(timing["peak_mib"] - timing["before_mib"] for timing in timings)
    cells = (
        arm,
        str(len(timings)),
        f"{median('wall_seconds'):.1f}",
        f"{median('cpu_seconds'):.1f} ({min(cpu):.1f} to {max(cpu):.1f})",
        f"{median('generation_cpu_seconds'):.1f}",
        f"{memory:.0f}",
        str(timings[0]["completion_tokens"]),
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
