"""Claims of textbooks about online RL, measured: ``python -m benchmarks evidence``.

    python -m benchmarks evidence            # every task and seed of the plan: about ten hours of one core
    python -m benchmarks evidence --task smollm2 --seeds 0 --arms grpo ppo
    python -m benchmarks evidence --task qwen      # Qwen2.5-0.5B on GSM8K, one GPU of 80 GB: not run yet
    python -m benchmarks evidence --print    # the table of the claims, from what is measured

The plan, with the expected differences, is ``claims.toml``. Each arm is written to
``benchmarks/results/evidence-TASK-SEED.json`` when it ends, and not run again; a killed one resumes. A seed's state
directory is removed when its arms are done.

A contrast is Σ weight · arm in each seed, whose arms answer the same problems. Its interval is Student's t over seeds,
with the variance of pairs that all seeds share besides, which more seeds do not reduce.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from scipy import stats

from benchmarks.evidence.runs import VARIANTS
from benchmarks.report import processor, table
from rlcore.errors import ConfigError, RlcoreError, TrainingError, shown
from rlcore.flows.presets import open_preset
from rlcore.flows.stages import stages
from rlcore.strict_config import build
from rlcore.tasks.store.storage import read_json, write_bytes

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results"
PRESETS = Path(__file__).parent / "presets"
ALPHA = 0.05  # of all primary contrasts together
NORMAL = 1.96  # half the width of a 95 % interval, in standard errors
LAST = 0.25  # of the completions, whose mean is the training score
CLAIMS = Path(__file__).with_name("claims.toml")


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A preset whose stages are arms, its seeds, and other arms."""

    preset: str
    seeds: Sequence[int] = (0, 1, 2)
    variants: tuple[str, ...] = tuple(VARIANTS)
    pairs: tuple[str, ...] = ()


TASKS = {
    "smollm2": Task(preset=str(PRESETS / "evidence.toml")),
    "long": Task(preset=str(PRESETS / "evidence_long.toml"), variants=()),
    "chat": Task(preset=str(PRESETS / "evidence_chat.toml"), variants=(), pairs=("prompts", "pairs", "judge_pairs")),
    "tiny": Task(preset=str(PRESETS / "evidence_tiny.toml"), seeds=range(10)),
    "qwen": Task(preset=str(PRESETS / "evidence_0_5b.toml")),
}


def main() -> int:
    """Run what is chosen and has no result, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TASKS, nargs="+", default=[name for name in TASKS if name != "qwen"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[], help="left out: those of the plan")
    parser.add_argument("--arms", nargs="+", default=[], help="only these")
    parser.add_argument("--preferences", type=Path, default=Path("data/alpaca_eval.jsonl"), help="AlpacaEval's pairs")
    parser.add_argument("--home", type=Path, default=ROOT / ".rlcore/evidence", help="for the state directories")
    parser.add_argument("--print", action="store_true", help="run nothing")
    options = parser.parse_args()
    try:
        for task in () if options.print else options.task:
            _run_task(task, options)
        sys.stdout.write(f"{claims_table(read_plan(CLAIMS), read_results(RESULTS))}\n")
    except (RlcoreError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def _run_task(task: str, options: argparse.Namespace) -> None:
    chosen = TASKS[task]
    overrides = [f"data.{name}.path={str(options.preferences.resolve())!r}" for name in chosen.pairs]
    arms = arms_of(task, overrides)
    if wrong := [arm for arm in options.arms if arm not in arms]:
        raise ConfigError(f"--arms: {task} has no {', '.join(wrong)}; there are {', '.join(sorted(arms))}")
    if chosen.pairs and not options.preferences.exists():
        sys.stdout.write(f"{task}: skipped, {options.preferences} is missing; name it with --preferences\n")
        return
    for seed in options.seeds or chosen.seeds:
        run_seed(task, seed, options.home.resolve() / f"{task}-{seed}", options.arms, overrides)


def arms_of(task: str, overrides: Sequence[str] = ()) -> list[str]:
    """Return the arms of a task: base and stages of its preset, each after its start, and variants."""
    config = open_preset(TASKS[task].preset, tuple(overrides))
    arms = {name for name, stage in config.stages.items() if stage.kind != "rejection"}  # which only makes data
    graph = [stage.name for stage in stages(config)]
    base = ["base"] if "evaluate_base" in graph else []
    return [*base, *(name for name in graph if name in arms), *TASKS[task].variants]


def run_seed(task: str, seed: int, home: Path, only: Sequence[str] = (), overrides: Sequence[str] = ()) -> None:
    """Run the arms of a seed that have no result, and remove the state directory when none is left."""
    path, commit, arms = RESULTS / f"evidence-{task}-{seed}.json", _commit(), arms_of(task, overrides)
    known: dict[str, Any] = {"task": task, "seed": seed, "machine": f"{processor()}, one thread", "arms": {}}
    known |= read_json(path) if path.exists() else {}
    for arm in [arm for arm in arms if arm not in known["arms"] and (not only or arm in only)]:
        sys.stderr.write(f"{task}, seed {seed}: {arm}\n")
        done = run_arm([TASKS[task].preset, str(seed), arm, *overrides], home)
        known["arms"][arm] = done["figures"] | {"commit": commit}
        write_results(known, path)
        for folder in (*done["unused"], home / "checkpoints"):  # hundreds of MB
            shutil.rmtree(folder, ignore_errors=True)
    if known["arms"].keys() >= set(arms):
        shutil.rmtree(home, ignore_errors=True)


def run_arm(arguments: Sequence[str], home: Path) -> dict[str, Any]:
    """Run an arm in its own process; return its figures and the folders that no other needs."""
    log = home / "log" / f"{arguments[2]}.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"RLCORE_HOME": str(home), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.evidence.runs", *arguments]
    with log.open("ab") as errors:
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=errors, check=False)
    if done.returncode:
        last = " ".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-3:])
        raise TrainingError(f"{arguments[2]} failed with code {done.returncode}: {shown(last)}", where=str(log))
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _commit() -> str:
    """Return the commit, marked if code differs from it."""
    status = ("status", "--porcelain", "--untracked-files=no", "--", ":/", ":(exclude,top)benchmarks/results")
    commit, changed = (
        subprocess.run(["git", *command], cwd=ROOT, capture_output=True, encoding="utf-8", check=True).stdout.strip()
        for command in (("rev-parse", "--short=8", "HEAD"), status)
    )
    return f"{commit}-dirty" if changed else commit


@dataclass(frozen=True, kw_only=True, slots=True)
class Contrast:
    """A sum of arms with weights, on which a claim is judged.

    Attributes:
        expected: The claim says that the sum is above 0, about this large; or, if 0,
        margin: that it is within ± this.
        primary: Judged by a corrected interval; others only get a 95 % interval.
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

    Costs outside the curve, such as a reward model's, come before it.
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

    An expected difference holds if the interval is above 0, and is contradicted below; no difference holds within the
    margin, and is contradicted outside.
    """
    bound = contrast.margin
    held = low > 0.0 if contrast.expected else -bound < low and high < bound
    contradicted = high < 0.0 if contrast.expected else low > bound or high < -bound
    return "held" if held else "contradicted" if contradicted else "not told apart"


def claims_table(plan: Plan, measured: Mapping[str, Arms]) -> str:
    """Render each contrast with its difference, interval and verdict on each task.

    A task outside the plan is judged on every claim.
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


if __name__ == "__main__":
    sys.exit(main())
