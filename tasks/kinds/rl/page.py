"""Page of online RL: training curves, the stop by a health rule, and over-optimization.

Gao et al. 2022 (arXiv 2210.10760) plot training reward and held-out accuracy against the square root of the KL from the
start: the training reward rises throughout, the other one rises, turns and falls.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from rlcore.checks.health import RewardHacking
from rlcore.tasks.drawing import plots
from rlcore.tasks.drawing.levels import format_level
from rlcore.tasks.drawing.result import Result
from rlcore.tasks.store.storage import read_json

_SMOOTHED = 5  # iterations in a mean of the training reward


def rl_page(result: Result, folder: Path) -> str:
    """Write ``curves.png``, and ``over_optimisation`` (``.png``, ``.md``) if the KL is measured and evaluations recur.

    The page of a run that a health rule stopped begins with the reason.
    """
    history = read_json(result.data / "history.json")
    plots.training_curves(history, folder / "curves.png", title=result.stage, confidence=result.confidence)
    stopped = read_json(result.data / "health.json")["stopped"]
    lines = [] if stopped is None else [str(stopped["text"])]
    if len(found := points(history)) > 1:
        _plot(found, folder / "over_optimisation.png", title=result.stage)
        lines.append(summary_text(found, confidence=result.confidence))
        (folder / "over_optimisation.md").write_text(lines[-1] + "\n", encoding="utf-8")
    return "\n\n".join(lines)


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """State of a run at an evaluation.

    ``kl``: nats per completion; ``paid``: mean reward of the last five iterations; ``held_out`` with its interval;
    ``lost``: drop below the best earlier accuracy, 0 if it is within noise or the reward has not risen.
    """

    iteration: int
    kl: float
    paid: float
    held_out: float
    low: float
    high: float
    lost: float

    @property
    def distance(self) -> float:
        """Square root of the KL."""
        return math.sqrt(self.kl)


def points(history: plots.History) -> tuple[Point, ...]:
    """Return the evaluations of a run that measures its KL, in order."""
    gamed, found = RewardHacking(), []
    for place, row in enumerate(history):
        lost = gamed(history, place)
        if lost is None or "kl/ref" not in row:
            continue
        last = [each["reward/mean"] for each in history[max(0, place + 1 - _SMOOTHED) : place + 1]]
        found.append(
            Point(
                iteration=int(row["iteration"]),
                kl=max(0.0, row["kl/ref"]) * row["completion/length"],
                paid=sum(last) / len(last),
                held_out=row["eval/accuracy"],
                low=row["eval/accuracy_low"],
                high=row["eval/accuracy_high"],
                lost=lost,
            )
        )
    return tuple(found)


def summary_text(found: Sequence[Point], *, confidence: float) -> str:
    """Summarize in a paragraph whether held-out accuracy fell beyond noise while the training reward rose."""
    best, last = max(found, key=lambda point: point.held_out), found[-1]
    interval = f"{format_level(confidence)} interval"
    ends = (
        f"Held out: {best.held_out:.3f}, {interval} [{best.low:.3f}, {best.high:.3f}], at its best (iteration "
        f"{best.iteration}, KL {best.kl:.2f} nats per completion); {last.held_out:.3f} [{last.low:.3f}, "
        f"{last.high:.3f}] at the end (KL {last.kl:.2f}). Paid: {best.paid:.3f}, then {last.paid:.3f}."
    )
    if last.lost > 0.0:
        return f"**Over-optimized**: the reward rose while held-out accuracy fell beyond noise. {ends}"
    return f"No over-optimisation is seen. {ends}"


def _plot(points: Sequence[Point], path: Path, *, title: str) -> None:
    figure = Figure(figsize=(6, 4), layout="constrained")
    paid = figure.subplots()
    held_out = paid.twinx()
    distance = [point.distance for point in points]
    paid.plot(distance, [point.paid for point in points], color=plots.BLUE, marker="o", markersize=3)
    means = [point.held_out for point in points]
    ends = ([point.held_out - point.low for point in points], [point.high - point.held_out for point in points])
    # Bars, not a band: the KL of a run may decrease again.
    held_out.errorbar(
        distance, means, yerr=np.clip(ends, 0.0, None), color=plots.ORANGE, marker="o", markersize=3, capsize=2
    )
    paid.set_xlabel("square root of the KL (nats per completion)")
    paid.set_ylabel("paid: reward/mean", color=plots.BLUE)
    held_out.set_ylabel("held out: eval/accuracy", color=plots.ORANGE)
    held_out.set_ylim(0, 1.02)
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
