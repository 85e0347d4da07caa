"""Bars of ``make bench-grpo``: CPU seconds and memory of a GRPO step, beside the floor.

python -m benchmarks.grpo_plot [.rlcore/bench-grpo.json] [docs/images/bench_grpo.png]
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from benchmarks.peers import work


def main(source: Path, target: Path) -> None:
    report = json.loads(source.read_text(encoding="utf-8"))
    settings = list(dict.fromkeys((row["model"], row["threads"]) for row in report["timings"]))
    figure, axes = plt.subplots(len(settings), 2, figsize=(9, 2.2 * len(settings)), squeeze=False)
    for (model, threads), (seconds, memory) in zip(settings, axes, strict=True):
        mine = [row for row in report["timings"] if (row["model"], row["threads"]) == (model, threads)]
        peaks = [row["gflops"] for row in report["peaks"] if (row["model"], row["threads"]) == (model, threads)]
        _bars(seconds, mine, lambda row: row["cpu_seconds"])
        seconds.axvline(work.floor_flops(model) / max(peaks) / 1e9, color="black", linestyle=":")
        seconds.set_title(f"{model}, {threads} thread(s): CPU seconds of a GRPO step (dotted: floor)", fontsize=9)
        _bars(memory, mine, lambda row: row["peak_mib"] - row["before_mib"])
        memory.set_title("peak MiB above the start", fontsize=9)
    figure.tight_layout()
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=110)


def _bars(axes: Axes, rows: list[dict[str, Any]], value: Any) -> None:
    arms = list(dict.fromkeys(row["arm"] for row in rows))[::-1]
    medians = [statistics.median(value(row) for row in rows if row["arm"] == arm) for arm in arms]
    bars = axes.barh(arms, medians, color=["tab:orange" if arm == "ours" else "tab:gray" for arm in arms])
    axes.bar_label(bars, fmt="%.1f" if max(medians) < 500 else "%.0f", padding=3, fontsize=8)
    axes.margins(x=0.15)
    axes.tick_params(labelsize=8)


if __name__ == "__main__":
    given = [Path(name) for name in sys.argv[1:]]
    defaults = [Path(".rlcore/bench-grpo.json"), Path("docs/images/bench_grpo.png")]
    main(*[*given, *defaults[len(given) :]][:2])
