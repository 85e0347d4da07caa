"""Does every algorithm learn what it surely can? Problems that the start solves sometimes must be learned.

    python -m benchmarks.sanity [--seeds 0 1 2] [--dtypes float32 bfloat16] [--algorithms grpo ppo ...] [--broken]

The sanity test of Qi et al. 2025 (arXiv 2510.26788): training problems that the start solves in 20 to 80 % of its tries
hold everything that is needed, so an algorithm that does not come to 95 % on them is broken, or its settings are. Each
row of the table of algorithms trains on them alone. Prints a Markdown table: the share of right answers among the
rollouts of the last four iterations, with its interval by problems, and the first iteration at which four iterations
in a row came to 95 %. The stages are cached in the home, so an interrupted measurement goes on where it was.

``--broken`` trains with advantages of the wrong sign, without the audit that would stop it: a test that such a run
passes would be none. It runs in a home of its own, which is removed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.dataset as ds

os.environ.setdefault("RLCORE_ENGINE", "inline")

from benchmarks.faults.lab import Patches
from benchmarks.faults.losses import LOSSES
from flows.run import run_targets
from rlcore.algorithms.table import ALGORITHMS
from tasks.home.settings import configure_environment, find_home

PRESET = str(Path(__file__).with_name("sanity.toml"))
WINDOW, BOUND = 4, 0.95
ROWS = tuple(name for name in ALGORITHMS if name != "distil")  # distillation sees no reward
SAMPLES = (
    "stages.grpo.group_size=1",
    "stages.grpo.prompts_per_iteration=128",
    "stages.grpo.critic.learning_rate=1e-3",
    "stages.grpo.critic.lam=0.95",
)
"""What an algorithm with a critic needs: as many completions, each of a problem of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Learned:
    """What became of one run: shares of right answers in training."""

    first: float
    last: float
    low: float
    high: float
    reached: int | None  # the iteration that ended four in a row at 95 %
    problems: int


def learned(rollouts: Path) -> Learned:
    """What the tables of rollouts of a run say. The interval is a bootstrap over problems, 95 %."""
    table = ds.dataset(rollouts, format="parquet").to_table(columns=["iteration", "prompt_id", "parts"]).to_pandas()
    table["right"] = [float(json.loads(parts)["math"] == 1.0) for parts in table["parts"]]
    curve = table.groupby("iteration")["right"].mean()
    smooth = curve.rolling(WINDOW).mean()
    reached = smooth[smooth >= BOUND].index
    end = table[table["iteration"] > curve.index.max() - WINDOW].groupby("prompt_id")["right"].agg(["sum", "count"])
    draws = np.random.default_rng(0).integers(len(end), size=(2000, len(end)))
    shares = end["sum"].to_numpy()[draws].sum(1) / end["count"].to_numpy()[draws].sum(1)
    low, high = np.quantile(shares, [0.025, 0.975])
    return Learned(
        first=float(curve.iloc[0]),
        last=float(end["sum"].sum() / end["count"].sum()),
        low=float(low),
        high=float(high),
        reached=int(reached[0]) if len(reached) else None,
        problems=int(table["prompt_id"].nunique()),
    )


def run(algorithm: str, *, dtype: str, seed: int, more: Sequence[str] = ()) -> Learned:
    """Train one row of the table on the problems."""
    overrides = [f"seed={seed}", f"hardware.dtype={dtype}", f"stages.grpo.algorithm={algorithm}", *more]
    if ALGORITHMS[algorithm].uses_critic:
        overrides += SAMPLES
    refs = run_targets(PRESET, overrides, ["grpo"])
    return learned(find_home().root / refs["grpo"].uri / "rollouts")


def table(found: dict[tuple[str, str], list[Learned]]) -> str:
    """The results as Markdown: a row for each algorithm and format, the seeds in order."""
    lines = [
        f"| algorithm | format | first iteration | last {WINDOW} | 95 % interval | 95 % after | learned |",
        "|---|---|---|---|---|---|---|",
    ]
    for (algorithm, dtype), runs in found.items():
        cells = [
            " ".join(f"{each.first:.2f}" for each in runs),
            " ".join(f"{each.last:.3f}" for each in runs),
            " ".join(f"[{each.low:.3f}, {each.high:.3f}]" for each in runs),
            " ".join("-" if each.reached is None else str(each.reached) for each in runs),
            f"{sum(each.reached is not None for each in runs)} of {len(runs)}",
        ]
        lines.append(f"| `{algorithm}` | {dtype} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def broken(*, dtype: str, seed: int) -> Learned:
    """GRPO with advantages of the wrong sign, without the audit, in a home that is removed."""
    patches, home = Patches(), os.environ.get("RLCORE_HOME")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["RLCORE_HOME"] = folder
        _, inject = LOSSES["advantages negated within the loss"]
        inject(patches)
        try:
            return run("grpo", dtype=dtype, seed=seed, more=("health.action=off", "health.audit.action=off"))
        finally:
            patches.undo()
            os.environ.pop("RLCORE_HOME") if home is None else os.environ.update(RLCORE_HOME=home)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--algorithms", nargs="+", choices=ROWS, default=ROWS)
    parser.add_argument("--broken", action="store_true")
    options = parser.parse_args()
    configure_environment(find_home())
    if options.broken:
        runs = {("grpo, wrong sign", dtype): [broken(dtype=dtype, seed=0)] for dtype in options.dtypes}
    else:
        runs = {
            (algorithm, dtype): [run(algorithm, dtype=dtype, seed=seed) for seed in options.seeds]
            for algorithm in options.algorithms
            for dtype in options.dtypes
        }
    sys.stdout.write(table(runs) + "\n")
    problems = sorted({each.problems for row in runs.values() for each in row})
    sys.stdout.write(f"\nProblems of a run: {problems[0]} to {problems[-1]}.\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
