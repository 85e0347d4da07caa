"""Do policies learn to use an environment? The presets stock and towns over several seeds.

    python -m benchmarks.environments [--presets stock towns] [--seeds 0 1 2]

Prints a row of a Markdown table for docs/benchmarks/environments.md as soon as a run is done: held-out accuracy before
and after RL, with its interval, and the share of episodes that call the environment. The stages run inline and are
cached, so an interrupted measurement goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

os.environ.setdefault("RLCORE_ENGINE", "inline")

from flows.run import every_target, run_targets
from tasks.home.settings import configure_environment, find_home
from tasks.home.storage import read_table

PRESETS = ("stock", "towns")
HEADER = """\
| preset | seed | SFT | GRPO | greedy answers that call | sampled episodes that call | CPU s |
|---|---|---|---|---|---|---|
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--presets", nargs="+", default=list(PRESETS), choices=PRESETS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    home = find_home()
    configure_environment(home)
    sys.stdout.write(HEADER)
    for seed in options.seeds:
        for preset in options.presets:
            started = time.process_time()
            overrides = (f"seed={seed}",)
            refs = run_targets(preset, overrides, every_target(preset, overrides))
            folders = {name: home.root / ref.uri for name, ref in refs.items()}
            sys.stdout.write(row(preset, seed, folders, time.process_time() - started) + "\n")
            sys.stdout.flush()
    return 0


def row(preset: str, seed: int, folders: Mapping[str, Path], seconds: float) -> str:
    """One run as a row of the table."""
    evaluated = [folders["evaluate_sft"], folders["evaluate_grpo"]]
    history = json.loads((folders["grpo"] / "history.json").read_text(encoding="utf-8"))
    sampled = [history[place]["episode/with_calls"] for place in (0, -1)]
    cells = [
        preset,
        str(seed),
        *map(_accuracy, evaluated),
        ", ".join(f"{_called(folder):.2f}" for folder in evaluated),
        " to ".join(f"{share:.2f}" for share in sampled),
        f"{seconds:.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def _accuracy(folder: Path) -> str:
    figures = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return f"{figures['eval/accuracy']:.3f} [{figures['eval/accuracy_low']:.3f}, {figures['eval/accuracy_high']:.3f}]"


def _called(folder: Path) -> float:
    """The share of greedy answers that hold a call."""
    answers = read_table(folder / "answers.parquet")
    greedy = answers[answers["mode"] == "greedy"]
    return float(greedy["completion"].str.contains("<tool:", regex=False).mean())


if __name__ == "__main__":
    sys.exit(main())
