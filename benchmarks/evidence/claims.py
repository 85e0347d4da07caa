"""Claims: the plan, written before the runs, results of the runs, and each contrast with its corrected interval.

A contrast is Σ weight · arm in each seed, whose arms answer the same problems. Its interval is Student's t over seeds.
A figure that every seed measures on the same pairs has their variance besides, which more seeds do not reduce.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from scipy import stats

from benchmarks.report import table
from rlcore.strict_config import build
from rlcore.tasks.store.storage import read_json, write_bytes

ALPHA = 0.05  # of all primary contrasts together
NORMAL = 1.96  # half the width of a 95 % interval, in standard errors
LAST = 0.25  # of the completions, whose mean is the training score
CLAIMS = Path(__file__).with_name("claims.toml")


@dataclass(frozen=True, kw_only=True, slots=True)
class Contrast:
    """A sum of arms with weights, on which a claim is judged.

    Attributes:
        expected: The claim says that the sum is above 0, about this large; or, if 0,
        margin: that it is within ± this.
        tasks: Tasks that it is measured on; none: those of the plan.
        primary: Judged, with an interval corrected for all that are; others only get a 95 % interval.
    """

    name: str
    arms: Mapping[str, float]
    measure: str
    expected: float = 0.0
    margin: float = 0.0
    tasks: tuple[str, ...] = ()
    primary: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """A claim in words, and its contrasts."""

    text: str
    source: str
    contrast: tuple[Contrast, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """All claims, and the ``tasks`` of most contrasts."""

    tasks: tuple[str, ...]
    claim: tuple[Claim, ...]

    @property
    def level(self) -> float:
        """Level of one primary interval: a contrast counts once per task (Bonferroni)."""
        contrasts = [contrast for claim in self.claim for contrast in claim.contrast if contrast.primary]
        return ALPHA / sum(len(contrast.tasks or self.tasks) for contrast in contrasts)


def read_plan(path: Path) -> Plan:
    """Read a plan. A ConfigError lists all wrong keys and values."""
    return build(Plan, tomllib.loads(path.read_text(encoding="utf-8")), source=str(path))


Arm = Mapping[str, Any]  # of a run: what :func:`benchmarks.evidence.runs.figures` returns
Arms = Mapping[str, Mapping[int, Arm]]  # of a task, by arm and seed


def read_results(folder: Path) -> dict[str, Arms]:
    """Read the files of results by task."""
    tasks: dict[str, dict[str, dict[int, Arm]]] = {}
    for document in map(read_json, sorted(folder.glob("evidence-*.json"))):
        for name, arm in document["arms"].items():
            tasks.setdefault(document["task"], {}).setdefault(name, {})[document["seed"]] = arm
    return {**tasks}


def write_results(document: Mapping[str, Any], path: Path) -> None:
    """Write the results of a seed, a line per arm."""
    head = [f"{json.dumps(key)}: {json.dumps(value)}," for key, value in document.items() if key != "arms"]
    arms = [f"{json.dumps(name)}: {json.dumps(arm, allow_nan=False)}" for name, arm in document["arms"].items()]
    write_bytes("\n".join(["{", *head, '"arms": {', ",\n".join(arms), "}}", ""]).encode(), path)


def value_of(arm: Arm, measure: str, *, cpu_seconds: float = math.inf) -> float | None:
    """Return a measure of a run, or None if the run has none; memory is in GiB.

    ``cpu_seconds`` ends the curve of ``score_at_equal_cpu``.
    """
    if measure == "accuracy":
        return arm["right"].count("1") / len(arm["right"]) if arm["right"] else None
    if measure == "memory":
        return arm["memory"]["total"] / 2**30 if arm["memory"] else None
    if measure in ("learning", "score_at_equal_cpu") and arm["curve"]["completions"]:
        return _score(arm, cpu_seconds, LAST) if measure == "score_at_equal_cpu" else _score(arm, math.inf, 1.0)
    found: float | None = arm["figures"].get(measure.removeprefix("figures."))
    return found


def _score(arm: Arm, cpu_seconds: float, part: float) -> float:
    """Return the mean score of the last part of the completions that the run had after so many seconds.

    What a run spent outside its curve, such as on a reward model, was spent before the curve.
    """
    completions, seconds = ([0.0, *arm["curve"][name]] for name in ("completions", "cpu_seconds"))
    until = cpu_seconds - arm["cpu_seconds"] + seconds[-1]
    last = max(float(np.interp(until, seconds, completions)), completions[1])
    sums = [0.0, *np.cumsum(np.diff(completions) * arm["curve"]["score"])]
    total = np.interp([(1.0 - part) * last, last], completions, sums)
    return float((total[1] - total[0]) / (part * last))


def difference(contrast: Contrast, arms: Arms) -> tuple[list[float], float]:
    """Return a contrast in each seed that all its arms have, and the standard error of its mean; infinite with one."""
    per_seed, shared, name = [], [], contrast.measure.removeprefix("figures.")
    for seed in sorted(set.intersection(*(set(arms.get(arm, {})) for arm in contrast.arms))):
        runs = [(weight, arms[arm][seed]) for arm, weight in contrast.arms.items()]
        limit = min(arm["cpu_seconds"] for _, arm in runs)
        values = [(weight, value_of(arm, contrast.measure, cpu_seconds=limit)) for weight, arm in runs]
        known = [weight * value for weight, value in values if value is not None]
        if len(known) == len(values):
            widths = [
                arm["figures"].get(f"{name}_high", 0.0) - arm["figures"].get(f"{name}_low", 0.0) for _, arm in runs
            ]
            per_seed.append(sum(known))
            shared.append(sum((w * width / (2.0 * NORMAL)) ** 2 for (w, _), width in zip(runs, widths, strict=True)))
    if len(per_seed) < 2:
        return per_seed, math.inf
    return per_seed, math.sqrt(np.var(per_seed, ddof=1) / len(per_seed) + fmean(shared))


def verdict(contrast: Contrast, low: float, high: float) -> str:
    """Return ``held``, ``contradicted`` or ``not told apart``.

    A claim with an expected difference holds if the interval is above 0 and is contradicted below 0; one of no
    difference holds if the interval is within the margin and is contradicted outside.
    """
    bound = contrast.margin
    held = low > 0.0 if contrast.expected else -bound < low and high < bound
    contradicted = high < 0.0 if contrast.expected else low > bound or high < -bound
    return "held" if held else "contradicted" if contradicted else "not told apart"


def claims_table(plan: Plan, measured: Mapping[str, Arms]) -> str:
    """Render each contrast with its difference, interval and verdict on each task.

    A task that the plan does not name is judged on every claim.
    """
    named = {*plan.tasks, *(task for claim in plan.claim for each in claim.contrast for task in each.tasks)}
    rows = []
    for claim in plan.claim:
        for number, contrast in enumerate(claim.contrast):
            others = named.difference(contrast.tasks or plan.tasks)
            cells = ["–" if task in others else _cell(contrast, arms, plan.level) for task, arms in measured.items()]
            rows.append(("" if number else claim.text, contrast.name, *cells))
    return table(("claim", "contrast", *measured), rows)


def _cell(contrast: Contrast, arms: Arms, level: float) -> str:
    """Return the difference with its 95 % interval, and the verdict with the corrected one."""
    per_seed, error = difference(contrast, arms)
    if not per_seed:
        return "not run"
    mean = fmean(per_seed)
    if error == math.inf:
        return f"{mean:+.3f}, 1 seed"
    own, corrected = (float(stats.t.isf(alpha / 2.0, len(per_seed) - 1)) * error for alpha in (ALPHA, level))
    low, high = mean - corrected, mean + corrected
    said = f"**{verdict(contrast, low, high)}** [{low:+.3f}, {high:+.3f}]" if contrast.primary else "secondary"
    return f"{mean:+.3f} [{mean - own:+.3f}, {mean + own:+.3f}], {said}"
