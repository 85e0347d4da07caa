"""Every recipe on the tiny model, one after another: what it ends at, what it takes.

    python -m benchmarks.recipes [--recipes rlhf_ppo rlvr_grpo ...]

Prints a Markdown table for docs/benchmarks/recipes.md. The stages run inline and share the cache: SFT and the reward
model are made once where recipes agree on them, so the seconds are those of what a recipe adds to the ones before it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("RLCORE_ENGINE", "inline")

from flows.run import every_target, run_targets
from tasks.home.settings import configure_environment, find_home

RECIPES = (
    "rlhf_ppo",
    "rlhf_grpo",
    "rlhf_dpo",
    "rlvr_grpo",
    "rlvr_ppo",
    "r1_zero",
    "two_rl",
    "three_way",
    "distil",
    "mixed",
    "reasoning",
    "agentic",
    "stock",
    "towns",
    "rlvr_code",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=RECIPES)
    options = parser.parse_args()
    home = find_home()
    configure_environment(home)
    rows = []
    for recipe in options.recipes:
        started = time.perf_counter()
        refs = run_targets(recipe, (), every_target(recipe, ()))
        folders = {name: home.root / ref.uri for name, ref in refs.items() if name.startswith("evaluate_")}
        rows.append(_row(recipe, folders, time.perf_counter() - started))
    sys.stdout.write("| recipe | held-out greedy accuracy, 95 % interval | seconds |\n|---|---|---|\n")
    sys.stdout.write("\n".join(rows) + "\n")
    return 0


def _row(recipe: str, folders: dict[str, Path], seconds: float) -> str:
    cells = []
    for name, folder in folders.items():
        figures = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        low, high = figures["eval/accuracy_low"], figures["eval/accuracy_high"]
        cells.append(f"{name.removeprefix('evaluate_')} {figures['eval/accuracy']:.3f} [{low:.3f}, {high:.3f}]")
    return f"| {recipe} | {'; '.join(cells)} | {seconds:.0f} |"


if __name__ == "__main__":
    sys.exit(main())
