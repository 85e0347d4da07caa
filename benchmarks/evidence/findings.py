"""Findings: each contrast of the plan on each task, from the results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from benchmarks.evidence.plan import Contrast, Plan
from benchmarks.evidence.results import Arm, Arms
from benchmarks.evidence.statistics import (
    ALPHA,
    Difference,
    Floats,
    Noise,
    difference,
    noise,
    problem_variance,
    seeds_needed,
    verdict,
)

NORMAL = 1.96  # half the width of a 95 % interval, in standard errors
LAST = 0.25  # of the completions, whose mean is the training score


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A contrast on a task.

    Attributes:
        verdict: "" if the contrast is not primary.
        needed: Seeds that would tell; None if it is told, or if more than 99 are needed.
    """

    claim: str
    contrast: str
    task: str
    difference: Difference
    verdict: str
    needed: int | None


def findings(plan: Plan, tasks: Mapping[str, Arms]) -> list[Finding]:
    """Judge every contrast on those of its tasks that have a seed of all its arms."""
    judged = (
        _judge(claim.name, contrast, task, tasks.get(task, {}), plan.level)
        for claim in plan.claim
        for contrast in claim.contrast
        for task in contrast.tasks or plan.tasks
    )
    return [finding for finding in judged if finding]


def _judge(claim: str, contrast: Contrast, task: str, arms: Arms, corrected: float) -> Finding | None:
    alpha = corrected if contrast.primary else ALPHA
    between = run_noise(arms, contrast.measure)
    found = contrast_of(contrast.arms, arms, contrast.measure, between=between, alpha=alpha)
    if found is None:
        return None
    decided = verdict(found, expected=contrast.expected, margin=contrast.margin) if contrast.primary else ""
    needed = None
    if decided == "not told apart":
        effect, is_margin = contrast.expected or contrast.margin, contrast.margin > 0.0
        needed = seeds_needed(effect, variance=found.variance, between=between, is_margin=is_margin, alpha=alpha)
    return Finding(claim=claim, contrast=contrast.name, task=task, difference=found, verdict=decided, needed=needed)


def run_noise(arms: Arms, measure: str) -> Noise:
    """Return the variance between runs of a measure, moderated over all arms that have it."""
    known = {
        name: {seed: value for seed, arm in runs.items() if (value := value_of(arm, measure)) is not None}
        for name, runs in arms.items()
    }
    return noise({name: runs for name, runs in known.items() if runs})


def contrast_of(
    weights: Mapping[str, float], arms: Arms, measure: str, *, between: Noise, alpha: float = ALPHA
) -> Difference | None:
    """Return a contrast with its interval from the seeds that all its arms have; None without one."""
    per_seed, problems, shared = [], [], []
    for seed in set.intersection(*(set(arms.get(name, {})) for name in weights)):
        runs = {name: arms[name][seed] for name in weights}
        limit = min(arm.cpu_seconds for arm in runs.values())
        values = {name: value_of(arm, measure, cpu_seconds=limit) for name, arm in runs.items()}
        if None in values.values():
            continue
        per_seed.append(sum(weight * (values[name] or 0.0) for name, weight in weights.items()))
        if measure == "accuracy":
            problems.append(problem_variance(weights, {name: _right(arm) for name, arm in runs.items()}))
        shared.append(sum(weight**2 * _shared_variance(runs[name], measure) for name, weight in weights.items()))
    if not per_seed:
        return None
    common = float(np.mean(shared))
    return difference(weights, per_seed, between=between, problems=problems, shared=common, alpha=alpha)


def value_of(arm: Arm, measure: str, *, cpu_seconds: float | None = None) -> float | None:
    """Return a measure of a run, or None if the run has none; memory is in GiB.

    ``cpu_seconds`` ends the curve of ``score_at_equal_cpu``; None: the whole run.
    """
    if measure == "accuracy":
        return arm.right.count("1") / len(arm.right) if arm.right else None
    if measure == "learning":
        return _cumulated(arm)[-1] / arm.curve.completions[-1] if arm.curve.completions else None
    if measure == "score_at_equal_cpu":
        limit = arm.cpu_seconds if cpu_seconds is None else cpu_seconds
        return _training_score(arm, limit) if arm.curve.completions else None
    if measure == "memory":
        return arm.memory["total"] / 2**30 if arm.memory else None
    return arm.figures.get(measure.removeprefix("figures."))


def _shared_variance(arm: Arm, measure: str) -> float:
    """Return the variance of a figure over its pairs or prompts, from its 95 % interval; 0 if it has none."""
    name = measure.removeprefix("figures.")
    low, high = (arm.figures.get(f"{name}_{end}", 0.0) for end in ("low", "high"))
    return ((high - low) / (2.0 * NORMAL)) ** 2


def _training_score(arm: Arm, cpu_seconds: float) -> float:
    """Return the mean score of the last quarter of the completions that the run had after so many seconds.

    What a run spent outside its curve, such as on a reward model, was spent before the curve.
    """
    before = arm.cpu_seconds - arm.curve.cpu_seconds[-1]
    completions = [0.0, *arm.curve.completions]
    seconds = before + np.array([0.0, *arm.curve.cpu_seconds])
    last = max(float(np.interp(cpu_seconds, seconds, completions)), completions[1])
    first = (1.0 - LAST) * last
    total = np.interp([first, last], completions, [0.0, *_cumulated(arm)])
    return float(total[1] - total[0]) / (last - first)


def _cumulated(arm: Arm) -> Floats:
    """Return the sum of the scores of all completions so far [points]."""
    return np.cumsum(np.diff([0, *arm.curve.completions]) * arm.curve.score)


def _right(arm: Arm) -> Floats:
    return np.array(list(arm.right), dtype=np.float64)
