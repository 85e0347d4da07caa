"""Cost of one update: CPU seconds against group size, prompt, completion, vocabulary, and model.

    python -m benchmarks growth [--repeats 3] [--out .rlcore/bench-growth.json]

One size grows, the others stay at the base; the sizes alternate, and the median of the repeats counts. Each curve has a
floor: the minimal FLOP of an exact update, at the machine's best matrix product. The exponent is the slope of a line
through the logarithms.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.floor import peak_flops
from benchmarks.peers.arena import describe, table, write
from benchmarks.peers.ours import make_learner, policy, samples_of
from benchmarks.peers.work import SHAPES, Work, shape

TOKENS_PER_MICROBATCH = 2048
BASE = {"group_size": 8, "prompt_tokens": 128, "completion_tokens": 64, "vocabulary": 2048, "hidden": 192, "layers": 4}


def work_of(sizes: Mapping[str, int]) -> Work:
    """Return the update of two groups on a random Llama of these sizes, whose shape it registers."""
    vocabulary, hidden, layers = (sizes[name] for name in ("vocabulary", "hidden", "layers"))
    numbers = (vocabulary, hidden, 8 * hidden // 3, layers, hidden // 32, hidden // 64, 8192)
    SHAPES["growth"] = shape("llama", *numbers, bos_token_id=None)
    prompt, completion = sizes["prompt_tokens"], sizes["completion_tokens"]
    return Work(
        task="update",
        shape="growth",
        num_prompts=2,
        group_size=sizes["group_size"],
        prompt_tokens=(prompt, prompt),
        completion_tokens=(completion, completion),
    )


SWEEPS: dict[str, tuple[int, ...]] = {
    "group_size": (2, 4, 8, 16, 32),
    "prompt_tokens": (64, 128, 256, 512, 1024),
    "completion_tokens": (16, 32, 64, 128, 256),
    "vocabulary": (1024, 4096, 16384, 49152),
    "hidden": (64, 128, 192, 320, 512),
    "layers": (1, 2, 4, 8, 16),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(".rlcore/bench-growth.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    seconds: dict[str, dict[int, list[float]]] = {name: {size: [] for size in sizes} for name, sizes in SWEEPS.items()}
    peaks = []
    for _ in range(options.repeats):
        peaks.append(peak_flops())
        for name, sizes in SWEEPS.items():
            for size in sizes:
                seconds[name][size].append(time_update(work_of({**BASE, name: size})))
    curves = [curve(name, seconds[name], max(peaks)) for name in SWEEPS]
    report = {
        "machine": describe(1, [os.getloadavg()[0]]),
        "peak_gflops": max(peaks) / 1e9,
        "base": BASE,
        "curves": curves,
    }
    write(options.out, report)
    sys.stdout.write(render(report) + "\n")
    return 0


def time_update(work: Work) -> float:
    """Return CPU seconds of the second update of a fresh learner: the first one makes the optimizer's state."""
    learner, samples = make_learner(work, policy(work), TOKENS_PER_MICROBATCH), samples_of(work)
    learner.update(samples, seed=0)
    start = time.process_time()
    learner.update(samples, seed=1)
    return time.process_time() - start


def curve(name: str, seconds: dict[int, list[float]], peak: float) -> dict[str, Any]:
    """Return sizes, median seconds, floor seconds, and the exponents of both."""
    sizes = list(seconds)
    measured = [statistics.median(seconds[size]) for size in sizes]
    floor = [work_of({**BASE, name: size}).floor_flops / peak for size in sizes]
    return {
        "name": name,
        "sizes": sizes,
        "seconds": measured,
        "floor": floor,
        "exponent": exponent(sizes, measured),
        "floor_exponent": exponent(sizes, floor),
    }


def exponent(sizes: list[int], seconds: list[float]) -> float:
    """Return the slope of ln(seconds) over ln(size), by least squares."""
    return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])


def render(report: dict[str, Any]) -> str:
    """Render a Markdown table of the sweeps."""
    rows = []
    for each in report["curves"]:
        ratios = [spent / least for spent, least in zip(each["seconds"], each["floor"], strict=True)]
        rows.append((
            each["name"].replace("_", " "),
            f"{each['sizes'][0]} to {each['sizes'][-1]}",
            f"{each['seconds'][0]:.3f} to {each['seconds'][-1]:.3f}",
            " ".join(f"{ratio:.1f}" for ratio in ratios),
            f"{each['exponent']:.2f}",
            f"{each['floor_exponent']:.2f}",
        ))  # fmt: skip
    header = ("grows", "sizes", "CPU s", "of the floor", "exponent", "floor's exponent")
    best = f"Best product {report['peak_gflops']:.0f} GFLOP a CPU second; base {report['base']}."
    return f"{report['machine']} {best}\n\n{table(header, rows)}"


if __name__ == "__main__":
    sys.exit(main())
