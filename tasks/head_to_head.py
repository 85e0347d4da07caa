"""Two RL runs side by side at equal cost: as many completions sampled, or as many seconds spent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

History = Sequence[Mapping[str, float]]
Budget = Literal["samples", "seconds"]


@dataclass(frozen=True, kw_only=True)
class Standing:
    """Where a run stood at one of its periodic evaluations, and what it had cost by then.

    ``samples``: completions drawn. ``tokens``: of those. ``seconds``: wall time of rollouts, scoring, update and sync.
    ``reward``: mean of the iteration. ``accuracy`` with ``low`` and ``high``: greedy, on held-out problems.
    """

    iteration: int
    samples: float
    tokens: float
    seconds: float
    reward: float
    accuracy: float
    low: float
    high: float


def standings(history: History) -> list[Standing]:
    """One for each periodic evaluation of a run, in order."""
    found: list[Standing] = []
    samples = tokens = seconds = 0.0
    for row in history:
        samples += row["rollouts/count"]
        tokens += row["rollouts/tokens"]
        seconds += sum(row[f"seconds/{part}"] for part in ("rollout", "score", "update", "sync"))
        if "eval/accuracy" in row:
            standing = Standing(
                iteration=int(row["iteration"]),
                samples=samples,
                tokens=tokens,
                seconds=seconds,
                reward=row["reward/mean"],
                accuracy=row["eval/accuracy"],
                low=row["eval/accuracy_low"],
                high=row["eval/accuracy_high"],
            )
            found.append(standing)
    return found


def at_equal(runs: Mapping[str, Sequence[Standing]], budget: Budget) -> dict[str, Standing | None]:
    """Each run's last standing within the largest budget that every run reached; None before its first evaluation."""
    limit = min((getattr(run[-1], budget) for run in runs.values() if run), default=0.0)
    return {
        label: next((one for one in reversed(run) if getattr(one, budget) <= limit), None)
        for label, run in runs.items()
    }


def head_to_head_table(histories: Mapping[str, History]) -> str:
    """The runs at equal samples and at equal compute, as Markdown; a sentence where nothing can be compared."""
    runs = {label: standings(history) for label, history in histories.items()}
    if len(runs) < 2 or not all(runs.values()):
        return "Needs two RL runs with `eval_every` above 0.\n"
    names = ["at equal", "run", "iteration", "samples", "tokens", "seconds", "reward"]
    names += ["held-out accuracy", "95 % interval"]
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    budgets: tuple[Budget, ...] = ("samples", "seconds")
    for budget in budgets:
        for label, one in at_equal(runs, budget).items():
            lines.append(f"| {budget} | {label} {_cells(one)} |")
    return "\n".join(lines) + "\n"


def _cells(one: Standing | None) -> str:
    if one is None:
        return "| – | – | – | – | – | – | –"
    return (
        f"| {one.iteration} | {one.samples:.0f} | {one.tokens:.0f} | {one.seconds:.1f} | {one.reward:.3f} "
        f"| {one.accuracy:.3f} | [{one.low:.3f}, {one.high:.3f}]"
    )
