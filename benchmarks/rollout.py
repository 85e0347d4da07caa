"""How many completion tokens does each rollout engine make in a second of processor time?

    make bench-rollout        (python -m benchmarks.rollout [--rounds 3] [--engines ...] [--out file])

``generate`` of transformers (one padded batch to its longest row), its continuous batching, the native engine, and
vLLM where the environment variable ENGINE_PYTHON names the interpreter of ``make engine``. 16, 64 and 256 completions
at once, 8 of each prompt of 66 to 128 tokens, of 16 tokens each or of long-tailed lengths (log-normal around 16, 4 to
128), on the tiny random Llama of :mod:`benchmarks.peers.work`, float32, one thread. Lengths are forced and checked.
The engines take turns, round by round.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.memory import resident_kib
from benchmarks.peers import work
from benchmarks.peers.arena import describe, machine, table, write
from benchmarks.rollout_engines import ENGINES, Engine, Task

SIZES, KINDS, GROUP_SIZE = (16, 64, 256), ("short", "tailed"), 8


@dataclass(frozen=True, kw_only=True)
class Run:
    """One engine's completions of one task. ``peak_mib``: above what the process held before them."""

    engine: str
    size: int
    kind: str
    tokens: int
    wall_seconds: float
    cpu_seconds: float
    peak_mib: float


def make_task(size: int, kind: str) -> Task:
    """``size`` completions and their lengths, the same for every engine."""
    generator = torch.Generator().manual_seed(size)
    prompts = list(itertools.islice(_prompts(generator), size // GROUP_SIZE))
    tailed = (16.0 * (0.9 * torch.randn(size, generator=generator)).exp()).round().clamp(4, 128).long()
    lengths = tailed if kind == "tailed" else torch.full((size,), 16)
    return Task(prompts=[prompt for prompt in prompts for _ in range(GROUP_SIZE)], lengths=lengths)


def _prompts(generator: torch.Generator) -> Iterator[tuple[int, ...]]:
    while True:
        length = int(torch.randint(66, 129, (), generator=generator))
        yield tuple(torch.randint(2, work.PROMPT_VOCABULARY, (length,), generator=generator).tolist())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engines", nargs="+", choices=ENGINES)
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES)
    parser.add_argument("--out", type=Path, default=Path(".rlcore/bench-rollout.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    loads, runs = [os.getloadavg()[0]], list[Run]()
    with ExitStack() as stack:
        names = options.engines or _available()
        engines = {name: stack.enter_context(ENGINES[name](work.make_model("tiny"))) for name in names}
        for engine in engines.values():
            engine.complete(make_task(16, "short"))  # what is made on first use is no engine's cost
        for _, size, kind in itertools.product(range(options.rounds), options.sizes, KINDS):
            for name, engine in engines.items():
                if size <= engine.largest:
                    runs.append(measure(name, engine, size, kind))
                    loads.append(os.getloadavg()[0])
            write(options.out, {"machine": machine(1, loads), "timings": [asdict(run) for run in runs]})
    sys.stdout.write(f"{describe(machine(1, loads))}\n\n{render(runs)}\n\nIn full: {options.out}\n")
    return 0


def _available() -> list[str]:
    if os.environ.get("ENGINE_PYTHON"):
        return list(ENGINES)
    sys.stderr.write("vLLM is left out: ENGINE_PYTHON names no interpreter (make engine)\n")
    return [name for name in ENGINES if name != "vLLM"]


def measure(name: str, engine: Engine, size: int, kind: str) -> Run:
    """One task, once."""
    task = make_task(size, kind)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak counts from here on
    held, wall, cpu = resident_kib("VmRSS"), time.perf_counter(), engine.cpu_seconds()
    engine.complete(task)
    run = Run(
        engine=name,
        size=size,
        kind=kind,
        tokens=int(task.lengths.sum()),
        wall_seconds=time.perf_counter() - wall,
        cpu_seconds=engine.cpu_seconds() - cpu,
        peak_mib=(resident_kib("VmHWM") - held) / 1024,
    )
    sys.stderr.write(f"{kind} {size}, {name}: {run.tokens / run.cpu_seconds:.0f} tokens per CPU second\n")
    return run


def render(runs: Sequence[Run]) -> str:
    """Medians of tokens per CPU second, with their range; tasks down, engines across."""
    names = list(dict.fromkeys(run.engine for run in runs))
    tasks = dict.fromkeys((run.kind, run.size) for run in sorted(runs, key=lambda run: run.kind))
    rows = []
    for kind, size in tasks:
        chosen = [[run for run in runs if (run.engine, run.kind, run.size) == (name, kind, size)] for name in names]
        tokens = next(run.tokens for group in chosen for run in group)
        rows.append((kind, str(size), str(tokens), *map(_cell, chosen)))
    return table(("lengths", "completions", "tokens", *names), rows)


def _cell(runs: Sequence[Run]) -> str:
    if not runs:
        return "–"
    rates = [run.tokens / run.cpu_seconds for run in runs]
    return f"{statistics.median(rates):.0f} ({min(rates):.0f} to {max(rates):.0f})"


if __name__ == "__main__":
    sys.exit(main())
