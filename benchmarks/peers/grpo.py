"""Time one GRPO step in TRL and in rlcore. The work is described in :mod:`benchmarks.peers.work`.

    python -m benchmarks peers [--model tiny smollm2] [--threads 1 2] [--rounds 3] [--arms ours trl-tuned]

Each arm runs in its own process. The arms alternate, round by round, so that a disturbance affects all of them and the
machine's best matrix product, from which the floor is computed. Prints Markdown tables of medians with the machine, the
versions and the load, and writes all timings as JSON.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers import arena, work
from benchmarks.peers.arena import Timing

ARMS = {
    "ours": ("benchmarks.peers.arm_ours",),
    "trl-tuned": ("benchmarks.peers.arm_trl", "trl-tuned"),
    "trl-defaults": ("benchmarks.peers.arm_trl", "trl-defaults"),
}
HEADER = (
    "arm",
    "n",
    "wall s",
    "CPU s (range)",
    "of it generation",
    "of floor",
    "of tuned TRL",
    "peak MiB (above start)",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=work.MODELS, default=["tiny"])
    parser.add_argument("--threads", nargs="+", type=int, default=[1])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--out", type=Path, default=Path(".rlcore/bench-grpo.json"))
    options = parser.parse_args()
    loads, peaks, timings = [os.getloadavg()[0]], list[Timing](), list[Timing]()
    for number in range(options.rounds):
        for model in options.model:
            for threads in options.threads:
                setting = {"model": model, "threads": threads, "round": number}
                peaks.append({**arena.run_arm("floor", ("benchmarks.floor",), threads), **setting})
                for arm in options.arms:
                    timings.append({**arena.run_arm(arm, (*ARMS[arm], model), threads), **setting})
                    loads.append(os.getloadavg()[0])
                    sys.stderr.write(f"{setting}, {arm}: {timings[-1]['cpu_seconds']:.1f} CPU s\n")
                    # after each one, so that an interrupted measurement keeps its results
                    arena.write(options.out, {"loads": loads, "peaks": peaks, "timings": timings})
    where = arena.describe(max(options.threads), loads)
    sys.stdout.write(f"{where}\n\n{tables(timings, peaks)}\n\nEvery timing: {options.out}\n")
    return 0


def tables(timings: Sequence[Timing], peaks: Sequence[Timing]) -> str:
    """Render a Markdown table of medians for each model and number of threads."""
    settings = dict.fromkeys((timing["model"], timing["threads"]) for timing in timings)
    return "\n\n".join(_table(timings, peaks, *setting) for setting in settings)


def _table(timings: Sequence[Timing], peaks: Sequence[Timing], model: str, threads: int) -> str:
    def of_setting(rows: Sequence[Timing]) -> list[Timing]:
        return [row for row in rows if (row["model"], row["threads"]) == (model, threads)]

    peak = max(row["gflops"] for row in of_setting(peaks))
    floor = work.floor_flops(model) / peak / 1e9
    arms: dict[str, list[Timing]] = {}
    for timing in of_setting(timings):
        arms.setdefault(timing["arm"], []).append(timing)
    tuned = _median(arms["trl-tuned"], "cpu_seconds") if "trl-tuned" in arms else None
    title = (
        f"Model {model}, {threads} thread(s). Floor: {work.floor_flops(model) / 1e12:.3f} TFLOP at {peak:.0f} GFLOP a "
        f"CPU second, so {floor:.1f} s."
    )
    return f"{title}\n\n{arena.table(HEADER, [_row(arm, rounds, floor, tuned) for arm, rounds in arms.items()])}"


def _median(timings: Sequence[Timing], name: str) -> float:
    return statistics.median(timing[name] for timing in timings)


def _row(arm: str, timings: Sequence[Timing], floor: float, tuned: float | None) -> tuple[str, ...]:
    cpu, peak = [timing["cpu_seconds"] for timing in timings], _median(timings, "peak_mib")
    middle = statistics.median(cpu)
    return (
        arm,
        str(len(timings)),
        f"{_median(timings, 'wall_seconds'):.1f}",
        f"{middle:.1f} ({min(cpu):.1f} to {max(cpu):.1f})",
        f"{_median(timings, 'generation_cpu_seconds'):.1f}",
        f"{middle / floor:.1f} ×",
        f"1/{tuned / middle:.2f}" if tuned else "–",
        f"{peak:.0f} ({peak - _median(timings, 'before_mib'):.0f})",
    )
