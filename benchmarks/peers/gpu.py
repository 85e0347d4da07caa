"""Tokens per second, MFU and memory of a GRPO update on a GPU, from 2k to 16k tokens of context, for rlcore and TRL.

    make bench-gpu      (python -m benchmarks.peers.gpu [--contexts 2048 ...] [--shape qwen3-0.6b] [--device cuda])

One prompt of a quarter of the context and 8 given completions, of a quarter of the rest to all of it; products in
bfloat16. TRL is measured if it is installed, on equal work, as in :mod:`benchmarks.peers.compare`. Without a GPU it
prints that and does nothing; ``--device cpu --shape micro --contexts 128`` tries the command. MFU is the useful FLOP
over the device's best matrix product, measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers import arena
from benchmarks.peers.same import require_same_work
from benchmarks.peers.work import SHAPES, Work

TOKENS_PER_MICROBATCH = 16384
NUM_STEPS = 4  # the first compiles kernels and makes the optimizer's state


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", nargs="+", type=int, default=[2048, 4096, 8192, 16384])
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path(".rlcore/bench-gpu.json"))
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.stdout.write("bench-gpu is skipped: this machine has no CUDA device\n")
        return 0
    timings = []
    sides = ("ours", "trl") if find_spec("trl") and find_spec("datasets") else ("ours",)
    for context in options.contexts:
        work, first = update_of(context, shape=options.shape, device=options.device), None
        for side, option in ((side, option) for side in sides for option in ("", "checkpointing")):
            size = TOKENS_PER_MICROBATCH if side == "ours" else max(1, min(8, TOKENS_PER_MICROBATCH // context))
            setting = json.dumps({"microbatch": size, "option": option})
            arguments = ("benchmarks.peers.arm", side, json.dumps(work.as_dict()), setting)
            found = arena.run_arm(side, arguments, threads=torch.get_num_threads())
            timings.append(
                {"side": side, "option": option, "context": context, "flops": work.floor_flops} | dict(found)
            )
            sys.stderr.write(f"{timings[-1]}\n")
            if "failed" not in found:
                first = first or found["work"]
                require_same_work(first, found["work"], names=("the first", f"{side} {option}"))
    peak = best_product(options.device)
    device = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    arena.write(options.out, {"device": device, "shape": options.shape, "peak_flops": peak, "timings": timings})
    sys.stdout.write(f"{device}, {options.shape}, {peak / 1e12:.2f} TFLOP/s at best.\n\n{render(timings, peak)}\n")
    return 0


def update_of(context: int, *, shape: str, device: str) -> Work:
    """Return the update on one group whose prompt and longest completion have ``context`` tokens."""
    rest = context - context // 4
    return Work(
        task="update",
        shape=shape,
        dtype="bfloat16",
        num_prompts=1,
        prompt_tokens=(context // 4, context // 4),
        completion_tokens=(rest // 4, rest),
        steps=NUM_STEPS,
        device=device,
    )


def render(timings: Sequence[Mapping[str, Any]], peak: float) -> str:
    """Render a Markdown table; ``peak``: FLOP per second."""
    header = ("context", "side", "option", "s a step", "tokens/s", "MFU", "peak MiB")
    return arena.table(header, [_row(timing, peak) for timing in timings])


def _row(timing: Mapping[str, Any], peak: float) -> tuple[str, ...]:
    start = (str(timing["context"]), timing["side"], timing["option"] or "–")
    if "failed" in timing:
        return (*start, timing["failed"], "–", "–", "–")
    seconds = statistics.median(timing["step_seconds"][1:])
    tokens = timing["work"]["tokens"] / NUM_STEPS
    share = timing["flops"] / NUM_STEPS / seconds / peak
    return (*start, f"{seconds:.2f}", f"{tokens / seconds:,.0f}", f"{share:.0%}", f"{timing['peak_mib']:,.0f}")


def best_product(device: str) -> float:
    """Return the FLOP per second of the device's best matrix product in bfloat16."""
    size = 8192 if device == "cuda" else 512
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    seconds = []
    for _ in range(30):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        result = left @ right
        float(result[0, 0])  # waits for the device
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds)


if __name__ == "__main__":
    sys.exit(main())
