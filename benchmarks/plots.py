"""A plot of a benchmark's report, beside it: ``python -m benchmarks.plots .rlcore/bench-ppo.json``.

Of arms that were compared: processor time and memory, as bars. Of rollout engines: tokens per CPU second by size.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.peers.arena import by_arm

Runs = Sequence[Mapping[str, Any]]


def main() -> int:
    for name in sys.argv[1:]:
        path = Path(name)
        timings = json.loads(path.read_text(encoding="utf-8"))["timings"]
        figure = plot_engines(timings) if "engine" in timings[0] else plot_arms(timings)
        figure.savefig(path.with_suffix(".png"), dpi=110)
        sys.stdout.write(f"{path.with_suffix('.png')}\n")
    return 0


def plot_arms(timings: Runs) -> Figure:
    """Medians over the rounds; each round is a point."""
    arms = by_arm(timings)
    figure = Figure(figsize=(9, 1.2 + 0.45 * len(arms)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    memory = {arm: [run["peak_mib"] - run["before_mib"] for run in runs] for arm, runs in arms.items()}
    _bars(left, {arm: [run["cpu_seconds"] for run in runs] for arm, runs in arms.items()}, "CPU seconds")
    _bars(right, memory, "peak memory, MiB above the bare process")
    left.invert_yaxis()
    return figure


def _bars(axes: Axes, values: Mapping[str, Sequence[float]], label: str) -> None:
    places = range(len(values))
    colours = ["tab:blue" if arm.startswith("ours") else "tab:gray" for arm in values]
    axes.barh(places, [statistics.median(group) for group in values.values()], color=colours, alpha=0.7)
    for place, group in zip(places, values.values(), strict=True):
        axes.plot(group, [place] * len(group), "k.", markersize=4)
    axes.set_yticks(places, list(values))
    axes.set_xlabel(label)


def plot_engines(timings: Runs) -> Figure:
    """A panel for each kind of lengths; a line per engine through its medians, each run a point."""
    kinds = list(dict.fromkeys(run["kind"] for run in timings))
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    panels = figure.subplots(1, len(kinds), sharey=True, squeeze=False)[0]
    for axes, kind in zip(panels, kinds, strict=True):
        for engine in dict.fromkeys(run["engine"] for run in timings):
            runs = [run for run in timings if (run["kind"], run["engine"]) == (kind, engine)]
            _line(axes, runs, engine)
        axes.set(title=f"{kind} lengths", xlabel="completions at once", xscale="log", ylim=(0, None))
        axes.set_xticks(sizes := sorted({run["size"] for run in timings}), [str(size) for size in sizes], minor=False)
        axes.minorticks_off()
    panels[0].set_ylabel("tokens per CPU second")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    return figure


def _line(axes: Axes, runs: Runs, label: str) -> None:
    rates: dict[int, list[float]] = {}
    for run in runs:
        rates.setdefault(run["size"], []).append(run["tokens"] / run["cpu_seconds"])
    (line,) = axes.plot(list(rates), [statistics.median(group) for group in rates.values()], label=label)
    for size, group in rates.items():
        axes.plot([size] * len(group), group, ".", color=line.get_color())


if __name__ == "__main__":
    sys.exit(main())
