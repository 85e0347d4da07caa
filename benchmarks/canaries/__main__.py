"""Rates of the sync canary: stops of correct syncs, and detected faults, by learning rate, precision and engine.

A small model learns arithmetic, then takes optimizer steps at each learning rate in each precision. After every step
the engine receives the weights and the canary checks it, with healthy engines and with injected faults. A step that
changes nothing in the engine's precision leaves nothing to detect, and is not counted. ``--python`` names the
interpreter of vLLM's environment; without it only the native engine is measured.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.canaries.session import FAULTS, Session, Warmer, native
from benchmarks.canaries.vllm import Cells, measure_vllm
from benchmarks.canaries.work import DTYPES, LEARNING_RATES, PARAMS, Cell, Work, detect, make_work, sound
from rlcore.evaluation.intervals import accuracy
from rlcore.sampling.native import NativeSampler

SYNCS, TRIALS = 100, 10
VLLM_SYNCS, VLLM_TRIALS = 10, 3
RANK = 4
FIRST_VERSION = 10_000  # seeds draws different from those that set the bounds


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", default="")
    parser.add_argument("--syncs", type=int, default=SYNCS, help="sound ones of each kind; 0: vLLM alone")
    parser.add_argument("--trials", type=int, default=TRIALS, help="of each fault, for each of these")
    parser.add_argument("--vllm-syncs", type=int, default=VLLM_SYNCS)
    parser.add_argument("--vllm-trials", type=int, default=VLLM_TRIALS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    cells: Cells = {}
    started = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        work = make_work(Path(folder))
        for name in DTYPES if options.syncs else ():
            _native(work, name, cells, syncs=options.syncs, trials=options.trials)
            print(f"native, {name}: {time.process_time() - started:.0f} s of processor time so far", flush=True)
        if options.syncs:
            _print_tables(cells)
        if options.python:
            cells.clear()
            measure_vllm(work, options.python, cells, syncs=options.vllm_syncs, trials=options.vllm_trials)
            _print_tables(cells)
    print(f"\n{time.process_time() - started:.0f} s of processor time, servers not counted")


def _native(work: Work, name: str, cells: Cells, *, syncs: int, trials: int) -> None:
    dtype = DTYPES[name]
    for rate in LEARNING_RATES:
        for kind, rank, count in (("native", 0, syncs), ("native, adapter", RANK, syncs // 2)):
            engine = native(work.model, work.tokenizer, dtype)
            engine.policy_version = FIRST_VERSION
            session = Session(work.model, engine, work.prompts, dtype, rank=rank, params=PARAMS)
            sound(session, cells.setdefault((kind, name, "", rate), Cell()), rate, syncs=count)
        for fault, broken in FAULTS.items():
            rank = RANK if "adapter" in fault else 0
            cell = cells.setdefault(("native, adapter" if rank else "native", name, fault, rate), Cell())
            for trial in range(trials):
                session, is_there = _faulty(work, dtype, broken, rank=rank, version=trial)
                detect(session, cell, rate, is_there=is_there)


def _faulty(
    work: Work, dtype: torch.dtype, broken: type[NativeSampler], *, rank: int, version: int
) -> tuple[Session, Callable[[], bool]]:
    """Break a healthy session's engine; return it, and True if the engine serves other weights now."""
    whole, engine = native(work.model, work.tokenizer, dtype), native(work.model, work.tokenizer, dtype, broken)
    whole.policy_version = engine.policy_version = version  # different draws in each trial
    session = Session(work.model, whole, work.prompts, dtype, rank=rank, params=PARAMS)
    session.begin()
    session.engine = engine

    def is_there() -> bool:
        whole.load_weights(session.truth.state, policy_version=session.version)
        pairs = zip(whole._model.state_dict().values(), engine._model.state_dict().values(), strict=True)
        return broken is Warmer or not all(torch.equal(one, other) for one, other in pairs)

    return session, is_there


def _print_tables(cells: Cells) -> None:
    _print_alarms(cells)
    _print_faults(cells)


def _print_alarms(cells: Cells) -> None:
    print("\nSound syncs\n")
    print("| engine | precision | syncs | stopped | log-odds, mean (largest) | temperature, range | hidden parts |")
    print("|---|---|---|---|---|---|---|")
    total = [0, 0]
    for engine in dict.fromkeys(key[0] for key in cells):
        for name in DTYPES:
            found = [cell for key, cell in cells.items() if key[:3] == (engine, name, "")]
            if not any(cell.log_odds for cell in found):
                continue
            syncs, stopped = sum(cell.syncs for cell in found), sum(cell.stopped for cell in found)
            total = [total[0] + syncs, total[1] + stopped]
            odds = [value for cell in found for value in cell.log_odds]
            warm = [value for cell in found for value in cell.temperatures]
            hidden = ", ".join(sorted(set().union(*(cell.hidden for cell in found)))) or "none"
            print(
                f"| {engine} | {name} | {syncs} | {stopped} | {sum(odds) / len(odds):.2g} ({max(odds):.2g}) "
                f"| {min(warm):.4f} to {max(warm):.4f} | {hidden} |"
            )
            for message in {message for cell in found for message in cell.messages}:
                print(f"  stopped: {message}")
    high = accuracy([True] * total[1] + [False] * (total[0] - total[1]), confidence=0.95).high
    print(f"\n{total[1]} of {total[0]} sound syncs were stopped: at most {high:.2%} (95 % interval)")


def _print_faults(cells: Cells) -> None:
    rates = " | ".join(f"{rate:g}" for rate in LEARNING_RATES)
    print("\nFaults found, of those that were there (by log-probabilities alone)\n")
    print(f"| engine | precision | fault | {rates} |")
    print("|---|---|---|" + "---|" * len(LEARNING_RATES))
    for engine, name, fault in dict.fromkeys(key[:3] for key in cells if key[2]):
        row = [cells[engine, name, fault, rate] for rate in LEARNING_RATES]
        print(f"| {engine} | {name} | {fault} | " + " | ".join(map(_found, row)) + " |")


def _found(cell: Cell) -> str:
    return f"{cell.stopped} of {cell.syncs} ({cell.by_logprobs})"


if __name__ == "__main__":
    main()
