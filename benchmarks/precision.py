"""Does half precision learn the same? The tiny preset in float32, bfloat16 and float16 over several seeds.

    python -m benchmarks.precision [--preset tiny] [--precisions float32 bfloat16 float16] [--seeds 0 1 2] [--arms ...]

Prints a Markdown table for docs/benchmarks/precision.md: held-out greedy accuracy after SFT, GRPO and PPO, with the
critic on a trunk of its own, on the policy's, and with policy and critic as adapters, and the reward model's held-out
accuracy. The stages are cached, so that an interrupted measurement goes on where it was.

A processor without units for float16 takes its products in float32 and rounds them: benchmarks/float16_products.py.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

os.environ.setdefault("RLCORE_ENGINE", "inline")

from benchmarks.float16_products import fast_float16
from flows.run import every_target, run_targets
from tasks.home.settings import configure_environment, find_home

ADAPTERS = (
    "stages.grpo.update.adapter.rank=8",
    "stages.ppo.update.adapter.rank=8",
    "stages.ppo.critic.placement=adapter",
)
#: what differs from the preset, by the name of a column's group
ARMS: Mapping[str, tuple[str, ...]] = {
    "full weights": (),
    "critic on the policy's trunk": ('without=["stages.grpo","promotion"]', "stages.ppo.critic.placement=head"),
    "adapters": ADAPTERS,
}
Row = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--precisions", nargs="+", default=["float32", "bfloat16", "float16"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    options = parser.parse_args()
    home = find_home()
    configure_environment(home)
    rows = [
        measure(options.preset, precision, seed, options.arms, home.root)
        for seed in options.seeds
        for precision in options.precisions
    ]
    sys.stdout.write(render(rows) + "\n")
    return 0


def measure(preset: str, precision: str, seed: int, arms: Sequence[str], root: Path) -> Row:
    """Some arms of one seed in one precision."""
    row: Row = {"seed": seed, "precision": precision}
    for arm in arms:
        overrides = (f"hardware.dtype={precision}", f"seed={seed}", *ARMS[arm])
        with fast_float16() if precision == "float16" else nullcontext():
            refs = run_targets(preset, overrides, every_target(preset, overrides))
        for name, ref in refs.items():
            if name.startswith("evaluate_"):
                row[arm, name.removeprefix("evaluate_")] = _read(root / ref.uri / "summary.json")
        if "reward_model" in refs:
            row["reward_model"] = _read(root / refs["reward_model"].uri / "metrics.json")
    return row


def _read(path: Path) -> dict[str, float]:
    figures: dict[str, float] = json.loads(path.read_text(encoding="utf-8"))
    return figures


def render(rows: list[Row]) -> str:
    """One table: a line per seed and precision, then the mean over the seeds of each precision."""
    columns = [
        ("SFT", "full weights", "sft"),
        ("GRPO", "full weights", "grpo"),
        ("PPO", "full weights", "ppo"),
        ("PPO, shared trunk", "critic on the policy's trunk", "ppo"),
        ("GRPO, adapters", "adapters", "grpo"),
        ("PPO, adapters", "adapters", "ppo"),
    ]
    header = ["precision", "seed", *(title for title, _, _ in columns), "reward model: pair accuracy"]
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    precisions = list(dict.fromkeys(row["precision"] for row in rows))
    for precision in precisions:
        own = [row for row in rows if row["precision"] == precision]
        values = [[*(row.get((arm, name)) for _, arm, name in columns), row.get("reward_model")] for row in own]
        for row, cells in zip(own, values, strict=True):
            lines.append(f"| {precision} | {row['seed']} | " + " | ".join(map(_cell, cells)) + " |")
        lines.append(f"| {precision} | mean | " + " | ".join(map(_mean, zip(*values, strict=True))) + " |")
    return "\n".join(lines)


def _name(figures: Mapping[str, float]) -> str:
    return "rm/eval_accuracy" if "rm/eval_accuracy" in figures else "eval/accuracy"


def _mean(cells: Sequence[Mapping[str, float] | None]) -> str:
    """The mean over the seeds; a dash where a figure is missing."""
    found = [cell[_name(cell)] for cell in cells if cell is not None]
    return f"**{statistics.fmean(found):.3f}**" if len(found) == len(cells) else "–"


def _cell(figures: Mapping[str, float] | None) -> str:
    if figures is None:
        return "–"
    name = _name(figures)
    return f"{figures[name]:.3f} [{figures[name + '_low']:.3f}, {figures[name + '_high']:.3f}]"


if __name__ == "__main__":
    sys.exit(main())
