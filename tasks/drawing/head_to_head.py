"""Two RL runs at equal cost: at equal numbers of sampled completions, or equal seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from matplotlib.figure import Figure

from rlcore.tasks.drawing.levels import format_level
from rlcore.tasks.drawing.plots import COLOURS

History = Sequence[Mapping[str, float]]
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
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    methods = list(dict.fromkeys(label.partition(",")[0] for label in runs))  # seeds of one configuration share a color
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
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
