"""Claims of textbooks about online RL, measured: ``python -m benchmarks evidence``.

    python -m benchmarks evidence            # every task and seed of the plan: about ten hours of one core
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
from benchmarks.report import processor
from rlcore.errors import ConfigError, RlcoreError, StorageError, TrainingError, shown
from rlcore.flows.presets import open_preset
from rlcore.flows.stages import stages
from rlcore.tasks.store.disk import to_storage_error
from rlcore.tasks.store.locks import file_lock
from rlcore.tasks.store.storage import read_json

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results"
WRITTEN = ("benchmarks/results", "docs/images")  # by this benchmark, relative to the repository
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
    options = _options()
    try:
        if not options.print:
            _check_arms(options)
            for task in options.task:
                _run_task(task, options)
        show()
    except RlcoreError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = [name for name, task in TASKS.items() if not task.needs_gpu]
    parser.add_argument("--task", choices=TASKS, nargs="+", default=usual)
    parser.add_argument("--seeds", type=_seed, nargs="+", default=[], help="left out: those of the plan")
    parser.add_argument("--arms", nargs="+", default=[], help="only these")
    parser.add_argument("--preferences", type=Path, default=Path("data/alpaca_eval.jsonl"), help="AlpacaEval's pairs")
    parser.add_argument("--home", type=Path, default=ROOT / ".rlcore/evidence", help="for the state directories")
    parser.add_argument("--print", action="store_true", help="run nothing")
    return parser.parse_args()


def _seed(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 0 on")
    return int(text)


def _check_arms(options: argparse.Namespace) -> None:
    """Raise a ConfigError for arms that none of the tasks has."""
    known = {arm for task in options.task for arm in arms_of(task, TASKS[task].overrides(options.preferences))}
    if wrong := [arm for arm in options.arms if arm not in known]:
        raise ConfigError(f"--arms: no task has {', '.join(wrong)}; there are {', '.join(sorted(known))}")


def _run_task(task: str, options: argparse.Namespace) -> None:
    if TASKS[task].pairs and not options.preferences.exists():
        sys.stdout.write(f"{task}: skipped, {options.preferences} is missing; name it with --preferences\n")
        return
    for seed in options.seeds or TASKS[task].seeds:
        home = options.home.resolve() / f"{task}-{seed}"
        run_seed(task, seed, home, options.arms, TASKS[task].overrides(options.preferences))


def show(results: Path = RESULTS, images: Path = ROOT / "docs/images") -> None:
    """Print the claims, the arms and the seeds needed; draw a figure per claim.

    A measured task that the plan does not name is a family of its own: each claim is judged on it too.
    """
    plan, measured = read_plan(), by_task(read_results(sorted(results.glob("evidence-*.json"))))
    others = [task for task in measured if task not in plan.every_task]
    found = findings(plan, measured)
    for task in others:
        found += findings(replace(plan, tasks=(task,)), {task: measured[task]})
    whole = replace(plan, tasks=(*plan.tasks, *others))
    costs = [f"{task}:\n\n{arms_table(arms)}" for task, arms in measured.items()]
    sys.stdout.write("\n\n".join([claims_table(whole, found), *costs, plan_table(plan)]) + "\n")
    for claim in plan.claim:
        tasks = {task for contrast in claim.contrast for task in contrast.tasks or whole.tasks}
        draw(claim, {task: arms for task, arms in measured.items() if task in tasks}, images)


def run_seed(task: str, seed: int, home: Path, only: Sequence[str] = (), overrides: Sequence[str] = ()) -> None:
    """Run the arms of a seed that have no result, and remove the state directory when none is left.

    Raises:
        StorageError: The state directory cannot be made, or another process runs this seed.
        DataError: The file of results is wrong.
    """
    path, commit, arms = RESULTS / f"evidence-{task}-{seed}.json", _commit(), arms_of(task, overrides)
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise to_storage_error("make", home, error) from error
    with file_lock(home.with_suffix(".lock"), wait=False) as is_mine:
        if not is_mine:
            raise StorageError(f"another process runs {task} with seed {seed}", where=str(home), fix="wait for it")
        for arm in arms:
            known = _known(path, task, seed)
            if arm not in known["arms"] and (not only or arm in only):
                sys.stdout.write(f"{task}, seed {seed}: {arm}\n")
                sys.stdout.flush()
                done = run_arm([TASKS[task].preset, str(seed), arm, *overrides], home)
                known["arms"][arm] = done["figures"] | {"commit": commit}
                write_results(known, path)
                _remove(home, done["unused"])
        if _known(path, task, seed)["arms"].keys() >= set(arms):
            shutil.rmtree(home, ignore_errors=True)


def _known(path: Path, task: str, seed: int) -> dict[str, Any]:
    """Return the results so far."""
    if not path.exists():
        return {"task": task, "seed": seed, "machine": machine(), "arms": {}}
    read_results([path])
    known: dict[str, Any] = read_json(path)
    return known


def _remove(home: Path, unused: Sequence[str]) -> None:
    """Remove artifacts that no other arm needs, hundreds of MB, and checkpoints of runs that might be extended."""
    for folder in (*unused, home / "checkpoints"):
        shutil.rmtree(folder, ignore_errors=True)


def machine() -> str:
    """Return the names of the GPU, if there is one, and of the processor."""
    return ", ".join(
        [*([torch.cuda.get_device_name()] if torch.cuda.is_available() else []), processor(), "one thread"]
    )


def arms_of(task: str, overrides: Sequence[str] = ()) -> list[str]:
    """Return the arms of a task: the base and stages of its preset, each after those that it starts from, variants."""
    config = open_preset(TASKS[task].preset, tuple(overrides))
    arms = {name for name, stage in config.stages.items() if stage.kind not in NOT_ARMS}
    graph = [stage.name for stage in stages(config)]
    base = ["base"] if "evaluate_base" in graph else []
    return [*base, *(name for name in graph if name in arms), *TASKS[task].variants]


def run_arm(arguments: Sequence[str], home: Path) -> dict[str, Any]:
    """Run an arm in a process of its own; return its figures and the folders that no other arm needs."""
    log = home / "log" / f"{arguments[2]}.txt"
    log.parent.mkdir(exist_ok=True)
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
    """Return the commit, marked if code differs from it; "unknown" without git."""
    try:
        commit = _git("describe", "--always", "--abbrev=8", "--exclude=*")
        changed = _git(
            "status",
            "--porcelain",
            "--untracked-files=no",
            "--",
            ":/",
            *(f":(exclude,top){written}" for written in WRITTEN),
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{commit}-dirty" if changed else commit


def _git(*command: str) -> str:
    return subprocess.run(["git", *command], cwd=ROOT, capture_output=True, encoding="utf-8", check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
