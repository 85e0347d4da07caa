"""Plots, one function each; each writes a self-contained PNG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle, pairwise
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rlcore.tasks.drawing.levels import format_level
from rlcore.tasks.drawing.result import Result
from rlcore.tasks.store.storage import read_json

mpl.use("Agg")  # no display on a worker
History = Sequence[Mapping[str, float]]
BLUE, ORANGE, GREY = "#2563a8", "#d9772b", "#8a8f98"
COLOURS = (BLUE, ORANGE, GREY, "#2c8a63", "#8a4fb0", "#a88400")


def training_curves(history: History, path: Path, *, title: str, confidence: float) -> None:
    """Plot reward with its interval, held-out accuracy, KL, length, clip fraction, entropy, explained variance."""
    figure = Figure(figsize=(13, 6), layout="constrained")
    axes = figure.subplots(2, 4).flatten()
    _reward(axes[0], history)
    _accuracy(axes[1], history, confidence)
    panels = ("kl/ref", "completion/length", "clip/fraction", "entropy", "value/explained_variance", "gradient_norm")
    for axis, name in zip(axes[2:], panels, strict=True):
        _line(axis, history, name)
    figure.suptitle(title)
    figure.savefig(path, dpi=110)


def loss_curve(history: History, name: str, path: Path, *, title: str) -> None:
    """Plot a loss over steps."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    _line(figure.subplots(), history, name)
    figure.suptitle(title)
    figure.savefig(path, dpi=110)


def draw_loss(result: Result, folder: Path, *, metric: str) -> str:
    """Write ``loss.png``: the loss of a stage over steps."""
    loss_curve(read_json(result.data / "history.json"), metric, folder / "loss.png", title=result.stage)
    return ""


def accuracy_bars(figures: Mapping[str, tuple[float, float, float]], path: Path, *, title: str) -> None:
    """Plot the held-out accuracy (mean, low, high) of each checkpoint with its interval."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axis = figure.subplots()
    means = np.array([mean for mean, _, _ in figures.values()])
    low = means - np.array([low for _, low, _ in figures.values()])
    high = np.array([high for _, _, high in figures.values()]) - means
    bars = axis.bar(list(figures), means, yerr=np.stack([low, high]).clip(min=0.0), color=BLUE, capsize=6)
    axis.bar_label(bars, labels=[f"{mean:.1%}" for mean in means], padding=4)
    axis.set_ylim(0, 1.12)
    axis.set_ylabel("held-out greedy accuracy")
    figure.suptitle(title)
    figure.savefig(path, dpi=110)


def histogram(bars: Sequence[tuple[float, int]], path: Path, *, title: str, label: str) -> None:
    """Plot counts of values: ``bars`` of a value from 0 to 1 and its count."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axis = figure.subplots()
    values = [value for value, _ in bars]
    width = 0.8 * min((later - value for value, later in pairwise(values)), default=0.125)
    axis.bar(values, [count for _, count in bars], width=width, color=BLUE)
    axis.set_xlim(-0.1, 1.1)
    axis.set_xlabel(label)
    axis.set_ylabel("prompts")
    figure.suptitle(title)
    figure.savefig(path, dpi=110)


def comparison_curves(histories: Mapping[str, History], path: Path, *, title: str) -> None:
    """Plot held-out accuracy and reward of several runs against the completions sampled."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for (label, history), colour in zip(histories.items(), cycle(COLOURS), strict=False):
        for axis, name in ((left, "eval/accuracy"), (right, "reward/mean")):
            steps, values = _series(history, name)
            axis.plot(steps, values, label=label, color=colour, marker="o" if len(steps) < 40 else None, markersize=3)
            axis.set_title(name)
            axis.set_xlabel("iteration")
            axis.legend()
    left.set_ylim(0, 1.02)
    figure.suptitle(title)
    figure.savefig(path, dpi=110)


def _reward(axis: Axes, history: History) -> None:
    steps, mean = _series(history, "reward/mean")
    _, std = _series(history, "reward/std")
    axis.plot(steps, mean, color=BLUE)
    axis.fill_between(steps, mean - std, mean + std, color=BLUE, alpha=0.15, label="± 1 std of the rollouts")
    axis.set_title("reward/mean")
    axis.legend(fontsize=7)


def _accuracy(axis: Axes, history: History, confidence: float) -> None:
    steps, mean = _series(history, "eval/accuracy")
    _, low = _series(history, "eval/accuracy_low")
    _, high = _series(history, "eval/accuracy_high")
    axis.plot(steps, mean, color=ORANGE, marker="o", markersize=3)
    axis.fill_between(steps, low, high, color=ORANGE, alpha=0.2, label=f"{format_level(confidence)} interval")
    axis.set_title("eval/accuracy")
    axis.set_ylim(0, 1.02)
    axis.legend(fontsize=7)


def _line(axis: Axes, history: History, name: str) -> None:
    steps, values = _series(history, name)
    axis.set_title(name)
    if len(steps) == 0:
        axis.text(0.5, 0.5, "not used in this run", ha="center", transform=axis.transAxes, color=GREY)
        axis.set_xticks([])
        axis.set_yticks([])
        return
    axis.plot(steps, values, color=BLUE)


def _series(history: History, name: str) -> tuple[np.ndarray, np.ndarray]:
    rows = [(row["iteration"], row[name]) for row in history if name in row]
    steps, values = zip(*rows, strict=True) if rows else ((), ())
    return np.asarray(steps, dtype=float), np.asarray(values, dtype=float)
