"""What does one PPO iteration cost, in the last TRL with a PPO trainer and here? See :mod:`benchmarks.peers.ppo_work`.

    make bench-ppo        (python -m benchmarks.peers.ppo [--rounds 3] [--threads 1] [--arms ...] [--out file])

In the environment of `make peers-ppo`, both sides with the same torch and transformers.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks.peers import arena
from benchmarks.peers.arena import Timing, by_arm, median, memory_mib, spread, table

MIB = 2**20
ARMS = {
    "ours, full": ("benchmarks.peers.ppo_ours", "full"),
    "ours, shared trunk": ("benchmarks.peers.ppo_ours", "trunk"),
    "ours, adapters": ("benchmarks.peers.ppo_ours", "adapters"),
    "TRL 0.29, full": ("benchmarks.peers.ppo_trl", "full"),
    "TRL 0.29, LoRA": ("benchmarks.peers.ppo_trl", "lora"),
}
# In float32 copies of the model: what learns counts 4 (weights, gradients, two moments), what is frozen 1. Adapters of
# rank 8 are about 2 % of the model. Ours has a copy in the engine, TRL samples with the policy itself.
WORKED_OUT = {
    "ours, full": "4 + 4 + 3 = 11",
    "ours, shared trunk": "4 + 3 = 7",
    "ours, adapters": "2 + adapters",
    "TRL 0.29, full": "4 + 4 + 2 = 10",
    "TRL 0.29, LoRA": "4 + 2 + adapter",
}


def run(size: str, *, name: str, description: str | None) -> int:
    """The comparison on one of the sizes of the work."""
    arms = {arm: (*arguments, size) for arm, arguments in ARMS.items()}
    return arena.compare(arms, render, name=name, description=description)


def render(timings: Sequence[Timing]) -> str:
    """Medians; memory above the bare process, in MiB and in float32 copies of the model, beside those worked out."""
    arms = by_arm(timings)
    header = ("arm", "n", "wall s", "CPU s (range)", "of it generation", "peak MiB", "of the model", "worked out")
    return table(header, [_row(arm, runs) for arm, runs in arms.items()])


def _row(arm: str, runs: Sequence[Timing]) -> tuple[str, ...]:
    model = 4 * runs[0]["num_parameters"] / MIB
    memory = memory_mib(runs)
    return (
        arm,
        str(len(runs)),
        f"{median(runs, 'wall_seconds'):.1f}",
        spread(runs, "cpu_seconds"),
        f"{median(runs, 'generation_cpu_seconds'):.1f}",
        f"{memory:.0f}",
        f"{memory / model:.1f}",
        WORKED_OUT[arm],
    )


if __name__ == "__main__":
    sys.exit(run("tiny", name="bench-ppo", description=__doc__))
