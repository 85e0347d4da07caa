"""Claims of textbooks about online RL, measured: ``python -m benchmarks evidence``.

    python -m benchmarks evidence            # every task and seed of the plan: about ten hours of one core
    python -m benchmarks evidence --task smollm2 --seeds 0 --arms grpo ppo
    python -m benchmarks evidence --task qwen      # Qwen2.5-0.5B on GSM8K, one GPU of 80 GB: not run yet
    python -m benchmarks evidence --print    # the table of the claims, from what is measured

The plan, with the expected differences, is ``claims.toml``. Each arm is written to
``benchmarks/results/evidence-TASK-SEED.json`` when it ends, and is not run again; a killed arm resumes from its
checkpoint. The state directory of a seed is removed when its arms are done.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.evidence.claims import CLAIMS, claims_table, read_plan, read_results, write_results
from benchmarks.evidence.runs import VARIANTS
from benchmarks.report import processor
from rlcore.errors import ConfigError, RlcoreError, TrainingError, shown
from rlcore.flows.presets import open_preset
from rlcore.flows.stages import stages
from rlcore.tasks.store.storage import read_json

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results"
PRESETS = Path(__file__).parent / "presets"


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A preset whose stages are arms, its seeds, other arms, and datasets that read the file of preferences."""

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
    """Return the arms of a task: the base and stages of its preset, each after those that it starts from, variants."""
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
    """Run an arm in a process of its own; return its figures and the folders that no other arm needs."""
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
    """Return the commit, marked if code differs from it; results are written by this benchmark."""
    status = ("status", "--porcelain", "--untracked-files=no", "--", ":/", ":(exclude,top)benchmarks/results")
    commit, changed = (
        subprocess.run(["git", *command], cwd=ROOT, capture_output=True, encoding="utf-8", check=True).stdout.strip()
        for command in (("rev-parse", "--short=8", "HEAD"), status)
    )
    return f"{commit}-dirty" if changed else commit


if __name__ == "__main__":
    sys.exit(main())
