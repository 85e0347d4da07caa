"""Figures of the evidence: one PNG per claim, a row of panels per task."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from benchmarks.evidence.findings import contrast_of, run_noise, value_of
from benchmarks.evidence.plan import Claim
from benchmarks.evidence.results import Arm, Arms
from benchmarks.evidence.statistics import Floats
from rlcore.tasks.drawing.plots import BLUE, COLOURS, GREY, ORANGE

mpl.use("Agg")  # no display
Panel = Callable[[Axes, Arms], None]
_WIDTH, _HEIGHT, _DPI = 8.0, 2.9, 100  # inches; a row of panels
_SMOOTHED = 5  # iterations
_PARTS = ("weights", "gradients", "optimizer", "activations", "kv_cache")
_COSTS = {"completions": "completions", "tokens": "tokens", "cpu_seconds": "CPU seconds"}


def draw(claim: Claim, tasks: Mapping[str, Arms], folder: Path) -> Path | None:
    """Draw the figure of a claim, or return None if no task has a run of its arms."""
    chosen = {task: {name: arms.get(name, {}) for name in claim.arms} for task, arms in tasks.items()}
    rows = {task: arms for task, arms in chosen.items() if any(arms.values())}
    if not rows:
        return None
    panels = _PANELS[claim.figure]
    figure = Figure(figsize=(_WIDTH, _HEIGHT * len(rows) + 0.7), layout="constrained")
    axes = figure.subplots(len(rows), len(panels), squeeze=False)
    for row, (task, arms) in zip(axes, rows.items(), strict=True):
        for axis, panel in zip(row, panels, strict=True):
            panel(axis, arms)
            axis.spines[["top", "right"]].set_visible(False)
        row[0].set_title(task, loc="left", fontsize=10)
    labels = {label: line for axis in axes.flat for line, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    if labels:
        figure.legend(labels.values(), labels, loc="outside lower center", ncols=min(len(labels), 6), frameon=False)
    figure.suptitle(textwrap.fill(claim.text, 84), fontsize=11)
    return _write(figure, folder / f"evidence_{claim.name}.png")


def _write(figure: Figure, path: Path) -> Path:
    """Write a PNG of 64 colors, which is a third of the size."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=_DPI)
    Image.open(file).convert("RGB").quantize(64, method=Image.Quantize.MAXCOVERAGE).save(path, optimize=True)
    return path


def _curve(cost: str) -> Panel:
    """Return a panel of the verifier's score over a cost of training."""

    def panel(axis: Axes, arms: Arms) -> None:
        _lines(axis, arms, lambda arm: _costs(arm, cost), "score")
        axis.set_xlabel(_COSTS[cost])
        axis.set_ylabel("score in training")

    return panel


def _costs(arm: Arm, cost: str) -> list[float]:
    """Return a cost at each point of the curve; what was spent outside the curve comes first."""
    so_far = getattr(arm.curve, cost)
    return [getattr(arm, cost) - so_far[-1] + each for each in so_far]


def _against_kl(label: str, value: str) -> Panel:
    """Return a panel over the KL, of the arms that have a reference policy."""

    def panel(axis: Axes, arms: Arms) -> None:
        measured = {name: {seed: arm for seed, arm in runs.items() if any(arm.curve.kl)} for name, runs in arms.items()}
        _lines(axis, measured, lambda arm: arm.curve.kl, value)
        axis.set_xlabel("KL (nats per token)")
        axis.set_ylabel(label)

    return panel


def _lines(axis: Axes, arms: Arms, places: Callable[[Arm], Sequence[float]], value: str) -> None:
    """Plot a column of the curves in moving means of five iterations: each seed thin, the mean of the seeds thick."""
    for (name, runs), colour in zip(arms.items(), COLOURS, strict=False):
        curves = [
            np.stack([_smooth(places(arm)), _smooth(getattr(arm.curve, value))])
            for arm in runs.values()
            if arm.curve.completions
        ]
        for x, y in curves:
            axis.plot(x, y, color=colour, linewidth=0.7, alpha=0.4)
        if curves:
            shortest = min(curve.shape[1] for curve in curves)
            x, y = np.mean([curve[:, :shortest] for curve in curves], axis=0)
            axis.plot(x, y, color=colour, linewidth=2, label=name)


def _smooth(values: Sequence[float]) -> Floats:
    sums = np.cumsum([0.0, *values])
    first = np.maximum(np.arange(1, len(sums)) - _SMOOTHED, 0)
    last = np.arange(1, len(sums))
    means: Floats = (sums[last] - sums[first]) / (last - first)
    return means


def _accuracies(axis: Axes, arms: Arms) -> None:
    """Plot the held-out accuracy of each arm with its 95 % interval, and each seed as a dot."""
    estimates = list(_estimates(arms))
    for place, (_, mean, half, seeds) in enumerate(estimates):
        axis.bar(place, mean, width=0.6, color=BLUE, alpha=0.75)
        axis.errorbar(place, mean, [[min(half, mean)], [min(half, 1.0 - mean)]], color="black", capsize=4)
        axis.scatter([place + 0.18] * len(seeds), seeds, color=ORANGE, s=14, zorder=3)
    axis.set_xticks(range(len(estimates)), [name.replace("_", "\n") for name, *_ in estimates], fontsize=9)
    axis.set_ylim(bottom=0.0)
    axis.set_ylabel("held-out accuracy")


def _estimates(arms: Arms) -> Iterator[tuple[str, float, float, list[float]]]:
    """Yield the arms that have an accuracy: name, mean, half of the interval (0 if there is none), each seed."""
    between = run_noise(arms, "accuracy")
    for name, runs in arms.items():
        found = contrast_of({name: 1.0}, arms, "accuracy", between=between)
        if found:
            half = found.high - found.mean if np.isfinite(found.high) else 0.0
            yield name, found.mean, half, [value_of(arm, "accuracy") or 0.0 for arm in runs.values()]


def _memory(axis: Axes, arms: Arms) -> None:
    """Plot the memory of an update by part, mean over seeds."""
    known = {name: [arm.memory for arm in runs.values() if arm.memory] for name, runs in arms.items()}
    known = {name: memories for name, memories in known.items() if memories}
    bottom = np.zeros(len(known))
    for part, colour in zip(_PARTS, COLOURS, strict=False):
        sizes = [float(np.mean([memory.get(part, 0.0) for memory in memories])) / 2**30 for memories in known.values()]
        axis.barh(list(known), sizes, left=bottom, height=0.6, color=colour, label=part.replace("_", " "))
        bottom += sizes
    axis.invert_yaxis()
    axis.set_xlabel("memory of the largest update (GiB)")


def _dose(axis: Axes, arms: Arms) -> None:
    """Plot the accuracy before and after RL by the start; the arms are pairs of a start and RL from it."""
    names = list(arms)
    estimates = {name: (mean, half, seeds) for name, mean, half, seeds in _estimates(arms)}
    for first, label, colour, aside in ((0, "before RL", GREY, -0.06), (1, "after RL", BLUE, 0.06)):
        shown = [(place, estimates[name]) for place, name in enumerate(names[first::2]) if name in estimates]
        places = [place for place, _ in shown]
        means, halves = ([each[index] for _, each in shown] for index in (0, 1))
        axis.errorbar(places, means, halves, color=colour, marker="o", capsize=4, linewidth=2, label=label)
        for place, (_, _, seeds) in shown:
            axis.scatter([place + aside] * len(seeds), seeds, color=colour, s=12, alpha=0.6)
    axis.set_xticks(range(len(names[::2])), names[::2])
    axis.set_ylim(bottom=0.0)
    axis.set_xlabel("start of RL")
    axis.set_ylabel("held-out accuracy")


def _bars(figures: Mapping[str, str], ylabel: str) -> Panel:
    """Return a panel of figures of the arms that have them: mean over seeds, each seed as a dot."""

    def panel(axis: Axes, arms: Arms) -> None:
        shown = {
            (name, colour): runs
            for (name, runs), colour in zip(arms.items(), COLOURS, strict=False)
            if any(figures.keys() & arm.figures for arm in runs.values())
        }
        width = 0.8 / max(len(shown), 1)
        for index, ((name, colour), runs) in enumerate(shown.items()):
            places = np.arange(len(figures)) + (index - (len(shown) - 1) / 2) * width
            values = np.array([[arm.figures.get(figure, np.nan) for figure in figures] for arm in runs.values()])
            axis.bar(places, values.mean(0), 0.9 * width, color=colour, alpha=0.75, label=name)
            axis.plot(places, values.T, ".", color="black")
        axis.axhline(0.5, color="black", linewidth=0.8)
        axis.set_ylim(0.0, 1.0)
        axis.set_xticks(range(len(figures)), list(figures.values()), fontsize=8)
        axis.set_ylabel(ylabel)

    return panel


_PAIRS = {
    "rm/eval_accuracy": "reward\nmodel",
    "rm/length_accuracy": "the longer\nanswer wins",
    "rm/accuracy_when_longer": "model where\nit does",
    "rm/accuracy_when_shorter": "model where it\ndoes not",
}
_WINS = {"win_rate/rate": "all answers", "win_rate/length_controlled": "at equal length"}
_PANELS: Mapping[str, Sequence[Panel]] = {
    "curves": [_curve(cost) for cost in _COSTS],
    "bars": [_accuracies],
    "memory": [_memory],
    "dose": [_dose],
    "preferences": [_bars(_PAIRS, "accuracy on held-out pairs"), _bars(_WINS, "win rate over the base")],
    "optimisation": [
        _against_kl("reward in training", "reward"),
        _against_kl("verifier's score", "score"),
        _accuracies,
    ],
}
