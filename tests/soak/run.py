"""``python -m tests.soak.run``: a long micro run of online RL; does anything grow with its iterations?

Prints a line at each of twenty places, then a table: what a process holds after a quarter and at the end, and the
growth in 1,000 iterations with its interval. Ends with 1 where something grows.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import torch

from rlcore.loop import open_run
from tests.soak.loop import Mark, make_components, recorded, slope, soak, warm

MARKS = 20
# What may grow in 1,000 iterations. The history takes half a kilobyte of memory an iteration, names of files more; an
# iteration costs some 25 yardsticks, 45,000 calls, and 1,400 kilobytes that are read or written.
BOUNDS = {
    "cost": 0.15,
    "calls": 50.0,
    "kilobytes": 2.0,
    "resident_mib": 4.0,
    "descriptors": 0.1,
    "threads": 0.1,
    "checkpoint_bytes": 10.0,
    "state_bytes": 10.0,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=10_000)
    parser.add_argument("--every", type=int, default=1, help="iterations between two checkpoints")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="rlcore-soak-") as name:
        folder = Path(name)
        components = make_components(folder, options.iterations, every=options.every)
        with (
            closing(components.learner),
            recorded(folder, options.iterations) as recorder,
            open_run(components, recorder) as run,
        ):
            marks = soak(run, MARKS, say=lambda text: print(text, file=sys.stderr, flush=True))
    print(f"Machine: {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}.\n")
    print(table(marks))
    return 1 if growing(marks) else 0


def table(marks: Sequence[Mark]) -> str:
    """Return the resources after the first quarter and at the end with their growth, as Markdown."""
    first, last = warm(marks)[0], marks[-1]
    lines = [
        f"| figure | after {first.iteration:,} iterations | {last.iteration:,} | growth in 1,000 | 95 % interval |",
        "|---|---|---|---|---|",
    ]
    for name in ("seconds", *BOUNDS):
        each, error = slope(marks, name)
        held = (f"{getattr(mark, name):.6g}" for mark in (first, last))
        lines.append(f"| {name} | {' | '.join(held)} | {each:.3g} | ± {1.96 * error:.2g} |")
    return "\n".join(lines)


def growing(marks: Sequence[Mark]) -> list[str]:
    """The figures that surely grow by more than their bound."""
    found = {name: slope(marks, name) for name in BOUNDS}
    return [name for name, (each, error) in found.items() if each - 1.96 * error > BOUNDS[name]]


if __name__ == "__main__":
    sys.exit(main())
