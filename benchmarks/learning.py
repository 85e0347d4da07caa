"""Learning of the tiny preset over several seeds: held-out greedy accuracy before SFT, after SFT, GRPO and PPO.

    python -m benchmarks.learning [--preset tiny] [--seeds 0 1 2]

Prints a Markdown table for docs/benchmarks/learning.md, with the 95 % interval of each figure and the gain over SFT of
each RL run. The stages run inline and are cached as in any other run, so an interrupted measurement resumes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("RLCORE_ENGINE", "inline")

from rlcore.flows.plan import every_target
from rlcore.flows.run import run_targets
from rlcore.tasks.store.settings import configure_environment, find_home

COLUMNS = ("base", "sft", "grpo", "ppo")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    home = find_home()
    configure_environment(home)
    rows = []
    for seed in options.seeds:
        overrides = (f"seed={seed}",)
        refs = run_targets(options.preset, overrides, every_target(options.preset, overrides))
        rows.append(_row(seed, {name: home.root / ref.uri for name, ref in refs.items()}))
    sys.stdout.write(render(rows) + "\n")
    return 0


def _row(seed: int, folders: Mapping[str, Path]) -> dict[str, Any]:
    summaries = {
        name: json.loads((folders[f"evaluate_{name}"] / "summary.json").read_text(encoding="utf-8"))
        for name in COLUMNS
        if f"evaluate_{name}" in folders
    }
    reward_model = json.loads((folders["reward_model"] / "metrics.json").read_text(encoding="utf-8"))
    return {"seed": seed, "summaries": summaries, "reward_model": reward_model}


def render(rows: list[dict[str, Any]]) -> str:
    """Render the table, with the machine that it was measured on."""
    names = [name for name in COLUMNS if name in rows[0]["summaries"]]
    lines = [
        f"Machine: {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}.",
        "",
        "| seed | " + " | ".join(names) + " | reward model: pair accuracy |",
        "|---" * (len(names) + 2) + "|",
    ]
    for row in rows:
        cells = [_cell(row["summaries"][name], "eval/accuracy") for name in names]
        lines.append(
            f"| {row['seed']} | " + " | ".join([*cells, _cell(row["reward_model"], "rm/eval_accuracy")]) + " |"
        )
    for name in names[2:]:
        gains = [row["summaries"][name]["eval/accuracy"] - row["summaries"]["sft"]["eval/accuracy"] for row in rows]
        lines.append(f"\nGain of {name} over SFT, points: " + ", ".join(f"{100 * gain:+.1f}" for gain in gains))
    return "\n".join(lines)


def _cell(figures: Mapping[str, float], name: str) -> str:
    return f"{figures[name]:.3f} [{figures[name + '_low']:.3f}, {figures[name + '_high']:.3f}]"


if __name__ == "__main__":
    sys.exit(main())
