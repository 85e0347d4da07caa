"""Groups without signal: what they cost, if they are kept, passed over or replaced, over several seeds.

    python -m benchmarks.silent_groups [--seeds 0 1 2] [--iterations 60]

GRPO goes several times through the 200 training problems of ``sanity.toml``, of which some are too hard for its start
and more and more are solved. Four ways to deal with groups whose rewards are all equal: train on them as well, pass
their prompts over (``sampling.revisit``), replace them (``sampling.max_replacements``), and both. Prints Markdown: the
groups that were sampled, how many had a signal, and the held-out accuracy. The stages are cached in the home, so an
interrupted measurement goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import dataclass

os.environ.setdefault("RLCORE_ENGINE", "inline")

from benchmarks.sanity import PRESET
from flows.run import run_targets
from tasks.home.settings import configure_environment, find_home

GROUP_SIZE = 8
WAYS = {
    "kept": (),
    "passed over": ("stages.grpo.sampling.revisit=0.5",),
    "replaced": ("stages.grpo.sampling.max_replacements=3",),
    "passed over and replaced": ("stages.grpo.sampling.revisit=0.5", "stages.grpo.sampling.max_replacements=3"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Spent:
    """What one run sampled, and where it ended: held-out greedy accuracy with its interval."""

    groups: float
    with_signal: float
    tokens: float
    accuracy: float
    low: float
    high: float


def run(way: str, *, seed: int, iterations: int) -> Spent:
    """One run through the problems."""
    overrides = (
        f"seed={seed}",
        f"stages.grpo.num_iterations={iterations}",
        f"stages.grpo.eval_every={iterations}",
        "stages.grpo.draw.low=0.0",
        "stages.grpo.draw.high=1.0",
        *WAYS[way],
    )
    refs = run_targets(PRESET, overrides, ["grpo"])
    history = json.loads((find_home().root / refs["grpo"].uri / "history.json").read_text(encoding="utf-8"))
    trained = 16.0  # prompts_per_iteration
    return Spent(
        groups=sum(row["rollouts/count"] for row in history) / GROUP_SIZE,
        with_signal=sum(trained * (1.0 - row["groups/zero_signal"]) for row in history),
        tokens=sum(row["rollouts/tokens"] for row in history),
        accuracy=history[-1]["eval/accuracy"],
        low=history[-1]["eval/accuracy_low"],
        high=history[-1]["eval/accuracy_high"],
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--iterations", type=int, default=60)
    options = parser.parse_args()
    configure_environment(find_home())
    names = ("groups without signal are", "seed", "groups", "with a signal", "share", "tokens", "held-out accuracy")
    sys.stdout.write(f"| {' | '.join(names)} |\n{'|---' * len(names)}|\n")
    for way in WAYS:
        for seed in options.seeds:
            found = run(way, seed=seed, iterations=options.iterations)
            sys.stdout.write(
                f"| {way} | {seed} | {found.groups:.0f} | {found.with_signal:.0f} | "
                f"{found.with_signal / found.groups:.2f} | {found.tokens:.0f} | "
                f"{found.accuracy:.3f} [{found.low:.3f}, {found.high:.3f}] |\n"
            )
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
