"""PPO against GRPO at equal samples and at equal compute, over several seeds: a table for each seed and one figure.

    python -m benchmarks.ppo_vs_grpo [--preset ppo_vs_grpo] [--seeds 0 1 2] [--figure docs/images/ppo_vs_grpo.png]

The stages run inline and are cached in the home, so an interrupted measurement goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

os.environ.setdefault("RLCORE_ENGINE", "inline")

from flows.presets import open_preset
from flows.run import run_targets
from tasks.home.settings import configure_environment, find_home
from tasks.report.head_to_head import Budget, Standing, at_equal, head_to_head_curves, head_to_head_table, standings

RUNS = {"GRPO": "grpo", "PPO": "ppo"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="ppo_vs_grpo")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--figure", type=Path, default=Path("docs/images/ppo_vs_grpo.png"))
    options = parser.parse_args()
    home = find_home()
    configure_environment(home)
    level = open_preset(options.preset).evaluation.confidence
    every: dict[int, dict[str, list[Standing]]] = {}
    for seed in options.seeds:
        refs = run_targets(options.preset, (f"seed={seed}",), list(RUNS.values()))
        folders = {label: home.root / refs[name].uri for label, name in RUNS.items()}
        histories = {label: json.loads((folder / "history.json").read_text()) for label, folder in folders.items()}
        every[seed] = {label: standings(history) for label, history in histories.items()}
        sys.stdout.write(f"Seed {seed}\n\n{head_to_head_table(histories, confidence=level)}\n")
    sys.stdout.write(_summary(every) + f"\nMachine: {platform.machine()}, {os.cpu_count()} cores.\n")
    head_to_head_curves(_by_seed(every), options.figure, title="PPO and GRPO, every seed", confidence=level)
    return 0


def _by_seed(every: Mapping[int, Mapping[str, Sequence[Standing]]]) -> dict[str, Sequence[Standing]]:
    return {f"{label}, seed {seed}": run for seed, runs in every.items() for label, run in runs.items()}


def _summary(every: Mapping[int, Mapping[str, list[Standing]]]) -> str:
    """Mean and range over the seeds of each run's held-out accuracy, at both budgets."""
    lines = ["| at equal | run | mean held-out accuracy | range over seeds | seeds |", "|---|---|---|---|---|"]
    budgets: tuple[Budget, ...] = ("samples", "seconds")
    for budget in budgets:
        standing = [at_equal(runs, budget) for runs in every.values()]
        for label in RUNS:
            found = [one.accuracy for each in standing if (one := each[label]) is not None]
            mean = statistics.fmean(found) if found else float("nan")
            span = f"{min(found):.3f} to {max(found):.3f}" if found else "–"
            lines.append(f"| {budget} | {label} | {mean:.3f} | {span} | {len(found)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
