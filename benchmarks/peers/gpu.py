"""Tokens per second, MFU and memory of an update on a GPU, from 2k to 16k tokens of context, for rlcore and TRL.

    make bench-gpu      (python -m benchmarks.peers.gpu [--contexts 2048 ...] [--shape qwen3-0.6b] [--device cuda])

The work is described in :mod:`benchmarks.peers.gpu_work`. It needs torch and transformers; TRL is measured if it is
installed, as in the environment of infra/install_peers.sh. Without a GPU it prints that and does nothing; with
``--device cpu --shape small --contexts 256`` the command can be tried. MFU is the useful FLOP, of a prompt once
and no padding, over the device's best matrix product in bfloat16, measured in the same run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers import arena
from benchmarks.peers.gpu_work import SHAPES, best_product

ARMS = {
    "ours": "benchmarks.peers.gpu_ours",
    "ours, recompute": "benchmarks.peers.gpu_ours",
    "TRL": "benchmarks.peers.gpu_trl",
    "TRL, recompute": "benchmarks.peers.gpu_trl",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", nargs="+", type=int, default=[2048, 4096, 8192, 16384])
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=present(ARMS))
    parser.add_argument("--out", type=Path, default=Path(".rlcore/bench-gpu.json"))
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.stdout.write("bench-gpu is skipped: this machine has no CUDA device\n")
        return 0
    timings = []
    for context in options.contexts:
        for arm in options.arms:
            arguments = (ARMS[arm], arm, options.shape, str(context), options.device)
            timings.append(arena.run_arm(arm, arguments, threads=torch.get_num_threads()))
            sys.stderr.write(f"{timings[-1]}\n")
    peak = best_product(options.device)
    device = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    arena.write(options.out, {"device": device, "shape": options.shape, "peak_flops": peak, "timings": timings})
    sys.stdout.write(f"{device}, {options.shape}, {peak / 1e12:.2f} TFLOP/s at best.\n\n{render(timings, peak)}\n")
    return 0


def present(arms: Mapping[str, str]) -> list[str]:
    """Return the arms whose libraries are installed."""
    has_trl = all(find_spec(name) for name in ("trl", "datasets"))
    return [arm for arm in arms if has_trl or not arm.startswith("TRL")]


def render(timings: Sequence[Mapping[str, Any]], peak: float) -> str:
    """Render a Markdown table; ``peak``: FLOP per second."""
    header = ("context", "arm", "s a step", "tokens/s", "MFU", "peak GiB")
    return arena.table(header, [_row(timing, peak) for timing in timings])


def _row(timing: Mapping[str, Any], peak: float) -> tuple[str, ...]:
    start = (str(timing["context"]), timing["arm"])
    if "failed" in timing:
        return (*start, timing["failed"], "–", "–", "–")
    seconds, memory = timing["seconds"], timing["peak_gib"]
    share = timing["useful_flops"] / seconds / peak
    held = "–" if memory is None else f"{memory:.1f}"
    return (*start, f"{seconds:.2f}", f"{timing['tokens'] / seconds:,.0f}", f"{share:.0%}", held)


if __name__ == "__main__":
    sys.exit(main())
