"""Plots, one function each, as self-contained PNGs; runs at equal numbers of sampled completions or equal seconds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any, Literal

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
_PANELS = ("kl/ref", "completion/length", "clip/fraction", "entropy", "value/explained_variance", "gradient_norm")


@contextmanager
def _figure(
    path: Path, title: str, rows: int = 1, columns: int = 1, *, size: tuple[float, float] = (6, 4), sharey: bool = False
) -> Iterator[Any]:
    """Yield the axes of a figure, which is saved at the end."""
    figure = Figure(figsize=size, layout="constrained")
    yield figure.subplots(rows, columns, sharey=sharey)
    figure.suptitle(title)
    figure.savefig(path, dpi=110)


def training_curves(history: History, path: Path, *, title: str, confidence: float) -> None:
    """Plot reward with its interval, held-out accuracy, KL, length, clip fraction, entropy, explained variance."""
    with _figure(path, title, 2, 4, size=(13, 6)) as grid:
        axes = grid.flatten()
        _reward(axes[0], history)
        _accuracy(axes[1], history, confidence)
        for axis, name in zip(axes[2:], _PANELS, strict=True):
            _line(axis, history, name)


def loss_curve(history: History, name: str, path: Path, *, title: str) -> None:
    """Plot a loss over steps."""
    with _figure(path, title) as axis:
        _line(axis, history, name)


def draw_loss(result: Result, folder: Path, *, metric: str) -> str:
    """Write ``loss.png``: the loss of a stage over steps."""
    loss_curve(read_json(result.data / "history.json"), metric, folder / "loss.png", title=result.stage)
    return ""


def accuracy_bars(figures: Mapping[str, tuple[float, float, float]], path: Path, *, title: str) -> None:
    """Plot the held-out accuracy (mean, low, high) of each checkpoint with its interval."""
    with _figure(path, title) as axis:
        means = np.array([mean for mean, _, _ in figures.values()])
        low = means - np.array([low for _, low, _ in figures.values()])
        high = np.array([high for _, _, high in figures.values()]) - means
        bars = axis.bar(list(figures), means, yerr=np.stack([low, high]).clip(min=0.0), color=BLUE, capsize=6)
        axis.bar_label(bars, labels=[f"{mean:.1%}" for mean in means], padding=4)
        axis.set_ylim(0, 1.12)
        axis.set_ylabel("held-out greedy accuracy")


def histogram(bars: Sequence[tuple[float, int]], path: Path, *, title: str, label: str) -> None:
    """Plot counts of values: ``bars`` of a value from 0 to 1 and its count."""
    with _figure(path, title) as axis:
        values = [value for value, _ in bars]
        width = 0.8 * min((later - value for value, later in pairwise(values)), default=0.125)
        axis.bar(values, [count for _, count in bars], width=width, color=BLUE)
        axis.set_xlim(-0.1, 1.1)
        axis.set_xlabel(label)
        axis.set_ylabel("prompts")


def comparison_curves(histories: Mapping[str, History], path: Path, *, title: str) -> None:
    """Plot held-out accuracy and reward of several runs against the completions sampled."""
    with _figure(path, title, 1, 2, size=(10, 4)) as (left, right):
        for (label, history), colour in zip(histories.items(), cycle(COLOURS), strict=False):
            for axis, name in ((left, "eval/accuracy"), (right, "reward/mean")):
                steps, values = _series(history, name)
                marker = "o" if len(steps) < 40 else None
                axis.plot(steps, values, label=label, color=colour, marker=marker, markersize=3)
                axis.set_title(name)
                axis.set_xlabel("iteration")
                axis.legend()
        left.set_ylim(0, 1.02)


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


Budget = Literal["samples", "seconds"]


@dataclass(frozen=True, kw_only=True)
class EvalPoint:
    """State of a run at a periodic evaluation, and its cost until then.

    ``samples``: completions sampled; ``tokens``: their tokens. ``seconds``: wall time of rollouts, scoring, update and
    sync. ``memory_bytes``: the largest measured by an update until then, 0 without a measurement. ``reward``: mean of
    the iteration. ``accuracy`` with ``low`` and ``high``: greedy, on held-out problems.
    """

    iteration: int
    samples: float
    tokens: float
    seconds: float
    memory_bytes: float
    reward: float
    accuracy: float
    low: float
    high: float


def eval_points(history: History) -> list[EvalPoint]:
    """Return a point for each periodic evaluation of a run, in order."""
    found: list[EvalPoint] = []
    samples = tokens = seconds = memory = 0.0
    for row in history:
        memory = max(memory, row.get("memory/total_bytes", 0.0))
        samples += row["rollouts/count"]
        tokens += row["rollouts/tokens"]
        # Prefetched rollouts share a sync: an iteration without one has no sync time.
        seconds += sum(row.get(f"seconds/{part}", 0.0) for part in ("rollout", "score", "update", "sync"))
        if "eval/accuracy" in row:
            standing = EvalPoint(
                iteration=int(row["iteration"]),
                samples=samples,
                tokens=tokens,
                seconds=seconds,
                memory_bytes=memory,
                reward=row["reward/mean"],
                accuracy=row["eval/accuracy"],
                low=row["eval/accuracy_low"],
                high=row["eval/accuracy_high"],
            )
            found.append(standing)
    return found


def at_equal_cost(runs: Mapping[str, Sequence[EvalPoint]], budget: Budget) -> dict[str, EvalPoint | None]:
    """Return each run's last evaluation within the largest common budget; None before its first one."""
    limit = min((getattr(run[-1], budget) for run in runs.values() if run), default=0.0)
    return {
        label: next((one for one in reversed(run) if getattr(one, budget) <= limit), None)
        for label, run in runs.items()
    }


def head_to_head_table(histories: Mapping[str, History], *, confidence: float) -> str:
    """Compare the runs at equal samples and at equal compute, as Markdown; a sentence if they cannot be compared."""
    runs = {label: eval_points(history) for label, history in histories.items()}
    if len(runs) < 2 or not all(runs.values()):
        return "Needs two RL runs with `eval_every` above 0.\n"
    names = ["at equal", "run", "iteration", "samples", "tokens", "seconds", "reward"]
    names += ["held-out accuracy", f"{format_level(confidence)} interval", "MiB in an update"]
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    budgets: tuple[Budget, ...] = ("samples", "seconds")
    for budget in budgets:
        for label, one in at_equal_cost(runs, budget).items():
            lines.append(f"| {budget} | {label} {_cells(one)} |")
    return "\n".join(lines) + "\n"


def _cells(one: EvalPoint | None) -> str:
    if one is None:
        return "| – " * 8
    return (
        f"| {one.iteration} | {one.samples:.0f} | {one.tokens:.0f} | {one.seconds:.1f} | {one.reward:.3f} "
        f"| {one.accuracy:.3f} | [{one.low:.3f}, {one.high:.3f}] | {one.memory_bytes / 2**20:.1f}"
    )


def head_to_head_curves(runs: Mapping[str, Sequence[EvalPoint]], path: Path, *, title: str, confidence: float) -> None:
    """Plot held-out accuracy with its interval against sampled completions and against seconds."""
    with _figure(path, title, 1, 2, size=(10, 4), sharey=True) as (left, right):
        # seeds of one configuration share a color
        methods = list(dict.fromkeys(label.partition(",")[0] for label in runs))
        for label, run in runs.items():
            colour = COLOURS[methods.index(label.partition(",")[0]) % len(COLOURS)]
            accuracy = [one.accuracy for one in run]
            for axis, cost in ((left, [one.samples for one in run]), (right, [one.seconds for one in run])):
                axis.plot(cost, accuracy, label=label, color=colour, marker="o", markersize=3)
                axis.fill_between(cost, [one.low for one in run], [one.high for one in run], color=colour, alpha=0.15)
        left.set_xlabel("completions sampled")
        right.set_xlabel("seconds (rollouts, scoring, update, sync)")
        left.set_ylabel(f"held-out greedy accuracy, {format_level(confidence)} interval")
        left.set_ylim(0, 1.02)
        left.legend()
