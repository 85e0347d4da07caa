"""Tables of the evidence as Markdown: the plan, the claims with their verdicts, the arms."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from benchmarks.evidence.findings import Finding, value_of
from benchmarks.evidence.plan import Contrast, Plan
from benchmarks.evidence.results import Arm, Arms
from benchmarks.evidence.statistics import ALPHA, MAX_SEEDS, Noise, seeds_needed
from benchmarks.report import table


def plan_table(plan: Plan) -> str:
    """Render each contrast with its expected difference and the seeds that it needs at the expected deviation.

    Degrees of freedom are those of the arms that the plan compares by the same measure, 2 fewer than one per run.
    """
    rows = [
        (claim.text, each.name, each.measure, _predicted(each), _planned_seeds(plan, each))
        for claim in plan.claim
        for each in claim.contrast
    ]
    return table(("claim", "contrast", "measure", "expected", "seeds for a power of 0.8"), rows)


def _predicted(contrast: Contrast) -> str:
    return f"{contrast.expected:+g}" if contrast.expected else f"within ±{contrast.margin:g}"


def _planned_seeds(plan: Plan, contrast: Contrast) -> str:
    if contrast.measure not in plan.sd:
        return "–"
    every = [each for claim in plan.claim for each in claim.contrast if each.measure == contrast.measure]
    freedom = len({arm for each in every for arm in each.arms}) - 1
    needed = seeds_needed(
        contrast.expected or contrast.margin,
        variance=plan.sd[contrast.measure] ** 2 * sum(weight**2 for weight in contrast.arms.values()),
        between=Noise(freedom=freedom, residual_freedom=freedom, seeds=2),
        is_margin=contrast.margin > 0.0,
        alpha=plan.level if contrast.primary else ALPHA,
    )
    return _seeds(needed)


def claims_table(plan: Plan, found: Sequence[Finding]) -> str:
    """Render each contrast with its difference, interval and verdict on each task."""
    known, tasks = {(each.claim, each.contrast, each.task): each for each in found}, plan.every_task
    rows = []
    for claim in plan.claim:
        for number, contrast in enumerate(claim.contrast):
            cells = [known.get((claim.name, contrast.name, task)) for task in tasks]
            needed = [f"{each.task} {_needed(each)}" for each in cells if each and each.verdict == "not told apart"]
            shown = [
                _finding(each, is_planned=task in (contrast.tasks or plan.tasks))
                for each, task in zip(cells, tasks, strict=True)
            ]
            rows.append(("" if number else claim.text, contrast.name, *shown, ", ".join(needed) or "–"))
    return table(("claim", "contrast", *tasks, "seeds that would tell"), rows)


def _finding(found: Finding | None, *, is_planned: bool) -> str:
    if found is None:
        return "not run" if is_planned else "–"
    each = found.difference
    interval = f"[{each.low:+.3f}, {each.high:+.3f}]" if math.isfinite(each.low) else "no interval"
    seeds = f"{each.seeds} seed{'s' if each.seeds > 1 else ''}"
    if found.verdict and math.isfinite(each.plain_low):
        seeds += f" (alone [{each.plain_low:+.3f}, {each.plain_high:+.3f}])"
    return f"{each.mean:+.3f} {interval}, {seeds}, " + (f"**{found.verdict}**" if found.verdict else "not judged")


def _needed(found: Finding) -> str:
    return _seeds(found.needed) if math.isfinite(found.difference.low) else "?"


def _seeds(needed: int | None) -> str:
    return f"above {MAX_SEEDS}" if needed is None else str(needed)


def arms_table(arms: Arms) -> str:
    """Render the held-out accuracy of each arm, mean and each seed, and its mean costs."""
    return table(
        ("arm", "accuracy", "each seed", "completions", "tokens", "CPU s"), [_arm(*each) for each in arms.items()]
    )


def _arm(name: str, runs: Mapping[int, Arm]) -> tuple[str, ...]:
    values = [value for arm in runs.values() if (value := value_of(arm, "accuracy")) is not None]
    costs: list[Callable[[Arm], float]] = [
        lambda arm: arm.completions,
        lambda arm: arm.tokens,
        lambda arm: arm.cpu_seconds,
    ]
    mean = f"{fmean(values):.3f}" if values else "–"
    seeds = ", ".join(f"{value:.3f}" for value in values) or "–"
    return (name, mean, seeds, *(f"{fmean(map(cost, runs.values())):,.0f}" for cost in costs))
