"""Claims of textbooks about online RL, measured: ``python -m benchmarks evidence``.

    python -m benchmarks evidence            # every task and seed of the plan: about twelve hours of one core
    python -m benchmarks evidence --task smollm2 --seeds 0 --arms grpo ppo
    python -m benchmarks evidence --task qwen      # Qwen2.5-0.5B on GSM8K, one GPU of 80 GB: not run yet
    python -m benchmarks evidence --print    # the table and the figures, from what is measured

The plan, with the expected differences and the runs needed, is ``claims.toml``. Each arm is written to
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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.evidence.figures import draw
from benchmarks.evidence.findings import findings
from benchmarks.evidence.plan import read_plan
from benchmarks.evidence.results import by_task, read_results, write_results
from benchmarks.evidence.runs import VARIANTS
from benchmarks.evidence.tables import arms_table, claims_table, plan_table
from benchmarks.peers.arena import processor
from rlcore.flows.presets import open_preset
from rlcore.flows.stages import stages
from rlcore.tasks.store.storage import read_json

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results"
NOT_ARMS = ("rejection",)  # kinds of stages that only make data


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A preset whose stages are arms, and its seeds.

    ``variants``: arms that are a stage under other settings. ``needs_gpu``: runs only if it is named. ``pairs``:
    datasets that read the file of preferences.
    """

    preset: str
    seeds: tuple[int, ...] = (0, 1, 2)
    variants: tuple[str, ...] = ()
    needs_gpu: bool = False
    pairs: tuple[str, ...] = ()

    def overrides(self, preferences: Path) -> list[str]:
        """Return the settings of a run."""
        return [f"data.{name}.path={str(preferences.resolve())!r}" for name in self.pairs]


TASKS = {
    "smollm2": Task(preset="evidence", variants=tuple(VARIANTS)),
    "long": Task(preset="evidence_long"),
    "chat": Task(preset="evidence_chat", pairs=("prompts", "pairs", "judge_pairs")),
    "tiny": Task(preset="evidence_tiny", seeds=tuple(range(10)), variants=tuple(VARIANTS)),
    "qwen": Task(preset="evidence_0_5b", variants=tuple(VARIANTS), needs_gpu=True),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--task", choices=TASKS, nargs="+", default=[name for name, task in TASKS.items() if not task.needs_gpu]
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[], help="left out: those of the plan")
    parser.add_argument("--arms", nargs="+", default=[], help="only these")
    parser.add_argument("--preferences", type=Path, default=Path("data/alpaca_eval.jsonl"), help="AlpacaEval's pairs")
    parser.add_argument("--home", type=Path, default=ROOT / ".rlcore/evidence", help="for the state directories")
    parser.add_argument("--print", action="store_true", help="run nothing")
    options = parser.parse_args()
    if not options.print:
        for task in options.task:
            if TASKS[task].pairs and not options.preferences.exists():
                sys.stdout.write(f"{task}: skipped, {options.preferences} is missing; name it with --preferences\n")
                continue
            for seed in options.seeds or TASKS[task].seeds:
                home = options.home / f"{task}-{seed}"
                run_seed(task, seed, home, options.arms, TASKS[task].overrides(options.preferences))
    show()
    return 0


def show(results: Path = RESULTS, images: Path = ROOT / "docs/images") -> None:
    """Print the claims, the arms and the seeds needed; draw a figure per claim.

    Measured tasks that the plan does not name count as planned: each claim is judged on them too.
    """
    plan, measured = read_plan(), by_task(read_results(sorted(results.glob("evidence-*.json"))))
    plan = replace(plan, tasks=(*plan.tasks, *(task for task in measured if task not in plan.every_task)))
    costs = [f"{task}:\n\n{arms_table(arms)}" for task, arms in measured.items()]
    sys.stdout.write("\n\n".join([claims_table(plan, findings(plan, measured)), *costs, plan_table(plan)]) + "\n")
    for claim in plan.claim:
        tasks = {task for contrast in claim.contrast for task in contrast.tasks or plan.tasks}
        draw(claim, {task: arms for task, arms in measured.items() if task in tasks}, images)


def run_seed(task: str, seed: int, home: Path, only: Sequence[str] = (), overrides: Sequence[str] = ()) -> None:
    """Run the arms of a seed that have no result, and remove the state directory when none is left."""
    path, preset = RESULTS / f"evidence-{task}-{seed}.json", TASKS[task].preset
    arms = [*arms_of(preset, overrides), *TASKS[task].variants]
    for arm in arms:
        empty = {"task": task, "seed": seed, "machine": machine(), "arms": {}}
        known: dict[str, Any] = read_json(path) if path.exists() else empty
        if arm not in known["arms"] and (not only or arm in only):
            sys.stdout.write(f"{task}, seed {seed}: {arm}\n")
            sys.stdout.flush()
            found = run_arm([preset, str(seed), arm, *overrides], home)
            known["arms"][arm] = found | {"commit": _commit()}
            write_results(known, path)
    if all(arm in read_json(path)["arms"] for arm in arms):
        shutil.rmtree(home, ignore_errors=True)


def machine() -> str:
    """Return the names of the GPU, if there is one, and of the processor."""
    return ", ".join(
        [*([torch.cuda.get_device_name()] if torch.cuda.is_available() else []), processor(), "one thread"]
    )


def arms_of(preset: str, overrides: Sequence[str] = ()) -> list[str]:
    """Return the base and the stages of a preset that are arms, each after those that it starts from."""
    config = open_preset(preset, tuple(overrides))
    arms = {name for name, stage in config.stages.items() if stage.kind not in NOT_ARMS}
    graph = [stage.name for stage in stages(config)]
    return [*(["base"] if "evaluate_base" in graph else []), *(name for name in graph if name in arms)]


def run_arm(arguments: Sequence[str], home: Path) -> dict[str, Any]:
    """Run an arm in a process of its own; return its figures."""
    log = home / "log" / f"{arguments[2]}.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"RLCORE_HOME": str(home), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.evidence.runs", *arguments]
    with log.open("ab") as errors:
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=errors, check=False)
    if done.returncode:
        raise SystemExit(f"{arguments[2]} failed with code {done.returncode}: {log}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _commit() -> str:
    return subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, encoding="utf-8", check=True
    ).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
