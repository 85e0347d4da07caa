"""How long does one GRPO step take, in TRL and here? The work is described in :mod:`benchmarks.peers.work`.

    make bench-grpo        (python -m benchmarks.peers.grpo_trl [--model tiny smollm2] [--threads 1 2] [--rounds 3] ...)

Each arm runs in a process of its own, the arms in turn, round by round, so that a disturbance meets all of them, and
with them the machine's best matrix product, from which the floor is worked out. Prints Markdown tables of medians with
the machine, the versions and the load, and writes every single timing as JSON; :mod:`benchmarks.grpo_plot` draws it.
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

from benchmarks.peers import work

ARMS = {
    "ours": ("benchmarks.peers.arm_ours",),
    "trl-tuned": ("benchmarks.peers.arm_trl", "trl-tuned"),
    "trl-defaults": ("benchmarks.peers.arm_trl", "trl-defaults"),
}
QUIET_LOAD = 1.5  # one-minute load average above which wall times say little


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=work.MODELS, default=["tiny"])
    parser.add_argument("--threads", nargs="+", type=int, default=[1])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--out", type=Path, default=Path(".rlcore/bench-grpo.json"))
    options = parser.parse_args()
    report: dict[str, Any] = {"machine": _machine(), "loads": [os.getloadavg()[0]], "peaks": [], "timings": []}
    for number in range(options.rounds):
        for model in options.model:
            for threads in options.threads:
                setting = {"model": model, "threads": threads, "round": number}
                report["peaks"].append(setting | _run(("benchmarks.peers.arm_peak",), threads))
                for arm in options.arms:
                    timing = _run((*ARMS[arm], model), threads)
                    report["timings"].append(timing | setting)
                    report["loads"].append(os.getloadavg()[0])
                    sys.stderr.write(f"{setting}, {arm}: {timing['cpu_seconds']:.1f} CPU s\n")
                    _write(options.out, report)  # a long measurement that is stopped keeps what it has
    sys.stdout.write(render(report) + f"\n\nEvery timing: {options.out}\n")
    return 0


def _run(arm: Sequence[str], threads: int) -> dict[str, Any]:
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-W", "ignore", "-m", *arm]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True)
    if finished.returncode != 0:
        raise SystemExit(f"{' '.join(arm)} failed:\n{finished.stderr[-2000:]}")
    timing: dict[str, Any] = json.loads(finished.stdout.strip().splitlines()[-1])
    return timing


def _machine() -> dict[str, Any]:
    return {
        "cpu": platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("torch", "transformers", "trl")},
    }


def _write(path: Path, report: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(report, indent=1), encoding="utf-8")
    temporary.replace(path)


def render(report: Mapping[str, Any]) -> str:
    """A Markdown table of medians for each model and number of threads, with what they were measured on."""
    machine, loads = report["machine"], report["loads"]
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    most = max(timing["threads"] for timing in report["timings"])
    # Our own process adds one per thread to what is there besides.
    quiet = loads[0] < QUIET_LOAD and max(loads) < most + QUIET_LOAD
    state = "quiet machine" if quiet else "BUSY machine: compare CPU seconds, not wall seconds"
    lines = [
        f"{machine['cpu']}, {machine['cores']} cores, Python {machine['python']}, {versions}; load {loads[0]:.1f} to "
        f"{max(loads):.1f} ({state})."
    ]
    settings = dict.fromkeys((timing["model"], timing["threads"]) for timing in report["timings"])
    for model, threads in settings:
        lines += ["", *_table(report, model, threads)]
    return "\n".join(lines)


def _table(report: Mapping[str, Any], model: str, threads: int) -> list[str]:
    def of_setting(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        return [row for row in rows if (row["model"], row["threads"]) == (model, threads)]

    peak = max(row["gflops"] for row in of_setting(report["peaks"]))
    floor = work.floor_flops(model) / peak / 1e9
    arms: dict[str, list[Mapping[str, Any]]] = {}
    for timing in of_setting(report["timings"]):
        arms.setdefault(timing["arm"], []).append(timing)
    tuned = _medians(arms["trl-tuned"]) if "trl-tuned" in arms else None
    return [
        f"Model {model}, {threads} thread(s). Floor: {work.floor_flops(model) / 1e12:.3f} TFLOP at {peak:.0f} GFLOP a "
        f"CPU second, so {floor:.1f} s.",
        "",
        "| arm | n | wall s | CPU s (range) | of it generation | of floor | of tuned TRL | peak MiB (above start) |",
        "|---|---|---|---|---|---|---|---|",
        *(_row(arm, timings, floor, tuned) for arm, timings in arms.items()),
    ]


def _medians(timings: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    names = ("wall_seconds", "cpu_seconds", "generation_cpu_seconds", "peak_mib", "before_mib")
    return {name: statistics.median(timing[name] for timing in timings) for name in names}


def _row(arm: str, timings: Sequence[Mapping[str, Any]], floor: float, tuned: Mapping[str, float] | None) -> str:
    cpu, medians = [timing["cpu_seconds"] for timing in timings], _medians(timings)
    above = medians["peak_mib"] - medians["before_mib"]
    faster = f"1/{tuned['cpu_seconds'] / medians['cpu_seconds']:.2f}" if tuned else "–"
    memory = f"{medians['peak_mib']:.0f} ({above:.0f})"
    cells = (
        arm,
        str(len(timings)),
        f"{medians['wall_seconds']:.1f}",
        f"{medians['cpu_seconds']:.1f} ({min(cpu):.1f} to {max(cpu):.1f})",
        f"{medians['generation_cpu_seconds']:.1f}",
        f"{medians['cpu_seconds'] / floor:.1f} ×",
        faster,
        memory,
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
