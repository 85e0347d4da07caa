"""Over-optimisation of a reward model that has seen few pairs, with and without a KL term, over several seeds.

    python -m benchmarks.over_optimisation [--seeds 0 1 2] [--coefficients 0.0001 0.01 0.1 1]

GRPO is paid by the reward model alone; a program that pays nothing says which held-out answers are right (Gao et al.
2022, arXiv 2210.10760, with a program in place of the gold reward model). The smallest coefficient measures the KL and
next to does not bind. Prints Markdown: what was paid, and what was right, at the best evaluation and at the end. The
stages are cached in the home, so an interrupted measurement goes on where it was; each run's page has the curve.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence

os.environ.setdefault("RLCORE_ENGINE", "inline")

from flows.run import run_targets
from tasks.home.settings import configure_environment, find_home
from tasks.report.over_optimisation import Point, points

SETTINGS = (
    "data.preferences.num_train=64",
    "stages.reward_model.min_accuracy=0.0",
    "stages.grpo.num_iterations=60",
    "stages.grpo.eval_every=4",
    "evaluation.num_monitor_problems=300",
    "health.action=off",
)
"""Few pairs, three times the iterations of the preset, and no rule that ends a gamed run."""


def run(coefficient: float, *, seed: int) -> tuple[Point, ...]:
    """The evaluations of one run."""
    overrides = (*SETTINGS, f"seed={seed}", f"stages.grpo.kl.coefficient={coefficient}")
    refs = run_targets("rlhf_grpo", overrides, ["grpo"])
    history = find_home().root / refs["grpo"].uri / "history.json"
    return points(json.loads(history.read_text(encoding="utf-8")))


def cells(found: Sequence[Point]) -> str:
    """The best evaluation and the last one of a run."""
    best, last = max(found, key=lambda point: point.held_out), found[-1]
    parts = [
        f"{found[0].paid:.2f} → {best.paid:.2f} → {last.paid:.2f}",
        f"{best.kl:.2f} → {last.kl:.2f}",
        f"{best.held_out:.3f} [{best.low:.3f}, {best.high:.3f}] ({best.iteration})",
        f"{last.held_out:.3f} [{last.low:.3f}, {last.high:.3f}]",
        "yes" if last.lost > 0.0 else "no",
    ]
    return " | ".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--coefficients", type=float, nargs="+", default=[0.0001, 0.01, 0.1, 1.0])
    options = parser.parse_args()
    configure_environment(find_home())
    names = (
        "KL coefficient",
        "seed",
        "paid: first, at the best, at the end",
        "KL, nats per completion",
        "right at the best (iteration)",
        "right at the end",
        "over-optimised",
    )
    sys.stdout.write(f"| {' | '.join(names)} |\n{'|---' * len(names)}|\n")
    for coefficient in options.coefficients:
        for seed in options.seeds:
            sys.stdout.write(f"| {coefficient:g} | {seed} | {cells(run(coefficient, seed=seed))} |\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
