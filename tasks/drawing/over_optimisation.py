"""Over-optimization: training reward and held-out accuracy against the KL.

Gao et al. 2022 (arXiv 2210.10760) plot both against the square root of the KL from the start: the training reward rises
throughout, the other one rises, turns and falls.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlcore.checks.health import RewardHacking
from rlcore.tasks.drawing.levels import format_level

History = Sequence[Mapping[str, float]]
_SMOOTHED = 5  # iterations in a mean of the training reward


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


def points(history: History) -> tuple[Point, ...]:
    """Return the evaluations of a run that measures its KL, in order; none of other runs."""
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
