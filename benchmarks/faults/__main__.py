"""The table of faults: ``python -m benchmarks.faults [--only WORD] [--sound ITERATIONS]``."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

import torch

from benchmarks.faults.around_learning import AROUND
from benchmarks.faults.before_learning import BEFORE
from benchmarks.faults.lab import SCENES, Patches, Verdict, parts_of, played
from benchmarks.faults.while_learning import WHILE
from rlcore.audit import direction

UNDETECTED = {
    "every iteration has the same random numbers": "each completion is drawn as is reported",
}


def names() -> list[str]:
    """Every fault."""
    return [*BEFORE, *WHILE, *AROUND]


def play(name: str) -> Verdict:
    """Inject a fault into its run."""
    patch = Patches()
    try:
        if name in AROUND:
            return AROUND[name](patch)
        scene, inject = (BEFORE | WHILE)[name]
        inject(patch)
        return played(lambda: parts_of(scene))
    finally:
        patch.undo()


def sound(total: int) -> Iterator[tuple[str, Verdict]]:
    """Runs without a fault of every scene, with seeds of their own, until so many iterations are done."""
    done, seed = 0, 0
    while done < total:
        seed += 1
        for scene in SCENES:
            if done < total:
                verdict = played(lambda scene=scene, seed=seed: parts_of(scene, seed=seed))  # type: ignore[misc]
                done += verdict.steps
                yield scene, verdict


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="faults whose name has this word")
    parser.add_argument("--sound", type=int, default=0, help="iterations without a fault")
    given = parser.parse_args()
    torch.set_num_threads(1)
    started = time.process_time()
    if given.sound:
        steps = alarms = 0
        for scene, verdict in sound(given.sound):
            steps += verdict.steps
            alarms += verdict.caught != "silent"
            print(f"{scene}: {verdict.steps} iterations, {verdict.caught} {verdict.message}", flush=True)
        print(f"{steps} sound iterations, {alarms} alarms, {time.process_time() - started:.0f} s of processor time")
        return
    chosen = [name for name in names() if given.only in name]
    counts = {"stopped": 0, "warned": 0, "silent": 0}
    print("| fault | | after | by |\n|---|---|---|---|")
    for name in chosen:
        verdict = play(name)
        counts[verdict.caught] += 1
        message = verdict.message.split("\n")[0].replace("|", "\\|")[:200] or UNDETECTED.get(name, "")
        print(f"| {name} | {verdict.caught} | {verdict.steps} | {message} |", flush=True)
    print(f"\n{len(chosen)} faults: {counts}, {time.process_time() - started:.0f} s of processor time")
    assert direction.LEAST


if __name__ == "__main__":
    main()
