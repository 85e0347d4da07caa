"""Tokens per second and memory of a GRPO update on a GPU, from 2k to 16k tokens of context, for rlcore and TRL.

    make bench-gpu      (python -m benchmarks.peers.gpu [--contexts 2048 ...] [--shape qwen3-0.6b] [--device cuda])

One prompt of a quarter of the context and 8 given completions, of a quarter of the rest to all of it; products in
bfloat16. TRL is measured if installed, on equal work. Without a GPU it prints that and does nothing; ``--device cpu
--shape micro --contexts 128`` tries the command.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from importlib.util import find_spec

import torch

from benchmarks.peers.compare import Timing, run_side
from benchmarks.peers.record import require_same_work
from benchmarks.peers.work import SHAPES, Work
from benchmarks.report import table

TOKENS_PER_MICROBATCH = 16384
NUM_STEPS = 4  # the first compiles kernels and makes the optimizer's state


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", nargs="+", type=int, default=[2048, 4096, 8192, 16384])
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.stdout.write("bench-gpu is skipped: this machine has no CUDA device\n")
        return 0
    sides = ("ours", "trl") if find_spec("trl") and find_spec("datasets") else ("ours",)
    timings = []
    for context in options.contexts:
        work, sound = update_of(context, shape=options.shape, device=options.device), list[Timing]()
        for side, option in ((side, option) for side in sides for option in ("", "checkpointing")):
            size = TOKENS_PER_MICROBATCH if side == "ours" else max(1, min(8, TOKENS_PER_MICROBATCH // context))
            candidate = {"side": side, "microbatch": size, "option": option}
            found = {"context": context, **run_side(work, candidate, threads=torch.get_num_threads())}
            timings.append(found)
            if "failed" not in found:
                sound.append(found)
                require_same_work(sound[0]["work"], found["work"], names=("the first", f"{side} {option}"))
    device = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    header = ("context", "side", "option", "s a step", "tokens/s", "peak MiB")
    sys.stdout.write(f"{device}, {options.shape}.\n\n{table(header, [_row(timing) for timing in timings])}\n")
    return 0


def update_of(context: int, *, shape: str, device: str) -> Work:
    """Return the update on one group whose prompt and longest completion have ``context`` tokens."""
    prompt, rest = context // 4, context - context // 4
    lengths = {"prompt_tokens": (prompt, prompt), "completion_tokens": (rest // 4, rest)}
    return Work(task="update", shape=shape, dtype="bfloat16", num_prompts=1, steps=NUM_STEPS, device=device, **lengths)


def _row(timing: Timing) -> tuple[str, ...]:
    start = (str(timing["context"]), timing["side"], timing["option"] or "–")
    if "failed" in timing:
        return (*start, timing["failed"], "–", "–")
    seconds = statistics.median(timing["step_seconds"][1:])
    tokens = timing["work"]["tokens"] / NUM_STEPS
    return (*start, f"{seconds:.2f}", f"{tokens / seconds:,.0f}", f"{timing['peak_mib']:,.0f}")


if __name__ == "__main__":
    sys.exit(main())
