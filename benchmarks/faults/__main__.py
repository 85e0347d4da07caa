"""Table of faults: ``python -m benchmarks.faults [--only WORD] [--results FILE]``.

With ``--sound ITERATIONS [--dtype NAME]``: false alarms in runs without a fault. Each result is appended to the file
immediately; existing results are not computed again.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from scipy.stats import beta

from benchmarks.faults.around import AROUND
from benchmarks.faults.controls import CONTROLS, OVERLAP
from benchmarks.faults.draws import DRAWS
from benchmarks.faults.engine import ENGINE
from benchmarks.faults.experience import EXPERIENCE
from benchmarks.faults.handover import HANDOVER
from benchmarks.faults.lab import CALCULATOR, NUM_ITERATIONS, SCENES, UNTIED, Patches, Verdict, components_of, played
from benchmarks.faults.later import LATER
from benchmarks.faults.losses import LOSSES
from benchmarks.faults.models import prompts, start
from benchmarks.faults.ratios import RATIOS
from benchmarks.faults.steps import STEPS
from benchmarks.faults.supervised import SOUND, SUPERVISED
from benchmarks.faults.tensors import TENSORS
from rlcore.hardware.machine import PRECISIONS

IN_RUNS = EXPERIENCE | ENGINE | LOSSES | STEPS | HANDOVER | RATIOS | TENSORS | DRAWS | LATER | CONTROLS
OUTSIDE = AROUND | SUPERVISED | OVERLAP
UNDETECTED = {
    "the engine draws ends 1.6 times as often": "an end is nearly sure or nearly impossible here, so few draws change",
    "later: gradients of the step before are kept": "a step clears its own, so there are none; it needs a failed one",
}


def play(name: str) -> Verdict:
    """Inject a fault into its run."""
    patch = Patches()
    try:
        if name in OUTSIDE:
            return OUTSIDE[name](patch)
        scene, inject = IN_RUNS[name]
        # Made before the fault: an error here would count as a detection.
        start(calling=scene == CALCULATOR, untied=scene == UNTIED)
        prompts()
        inject(patch)
        return played(lambda: components_of(scene))
    finally:
        patch.undo()


def sound_runs(total: int, dtype: str) -> Iterator[tuple[str, str, int]]:
    """Yield runs without a fault for a number of iterations: a name, the scene, and the seed of each."""
    done = seed = 0
    while done < total:
        seed += 1
        for scene in SCENES:
            if done < total:
                yield f"{scene}, seed {seed}, {dtype}", scene, seed
            done += SCENES[scene].get("num_iterations", NUM_ITERATIONS)


def written(results: Path) -> dict[str, Verdict]:
    """Read a file of results, by name."""
    lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    return {row.pop("name"): Verdict(**row) for row in map(json.loads, lines)}


def found(name: str, work: Callable[[], Verdict], results: Path) -> Verdict:
    """Return the recorded result, or run ``work`` and record its result."""
    known = written(results)
    if name in known:
        return known[name]
    verdict = work()
    with results.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"name": name, **asdict(verdict)}) + "\n")
    return verdict


def show_faults(only: str, results: Path) -> None:
    """Print the table of the faults whose names contain the word ``only``."""
    counts = Counter[str]()
    print("| fault | | after | by |\n|---|---|---|---|")
    for name in [*IN_RUNS, *OUTSIDE]:
        if only in name:
            verdict = found(name, partial(play, name), results)
            counts[verdict.caught] += 1
            says = UNDETECTED.get(name) or verdict.message.split("\n")[0].replace("|", "\\|")[:160]
            print(f"| {name} | {verdict.caught} | {verdict.steps} | {says} |", flush=True)
    print(f"\n{counts.total()} faults: {dict(counts)}")


def show_sound(total: int, dtype: str, results: Path) -> None:
    """Print how many of at least this number of healthy iterations were stopped or warned about."""
    steps = alarms = 0
    works: list[tuple[str, Callable[[], Verdict]]] = [
        (name, partial(played, partial(components_of, scene, seed=seed, dtype=PRECISIONS[dtype])))
        for name, scene, seed in sound_runs(total, dtype)
    ]
    for name, work in [*works, *((name, partial(each, Patches())) for name, each in SOUND.items())]:
        verdict = found(name, work, results)
        steps += verdict.steps
        alarms += verdict.caught != "silent"
        if verdict.caught != "silent":
            print(f"{name}: {verdict.caught} after {verdict.steps}: {verdict.message}", flush=True)
    most = beta.ppf(0.975, alarms + 1, steps - alarms) if alarms else 3.0 / steps  # Clopper-Pearson; rule of three
    print(f"{steps} sound iterations, {alarms} alarms: at most {most:.2g} of them at 95 %")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="faults whose name has this word")
    parser.add_argument("--sound", type=int, default=0, help="iterations without a fault, in place of faults")
    parser.add_argument("--dtype", default="float32", choices=PRECISIONS, help="of the products in sound runs")
    parser.add_argument("--results", type=Path, default=Path("faults.jsonl"), help="what is known, and will be")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.sound:
        show_sound(given.sound, given.dtype, given.results)
    else:
        show_faults(given.only, given.results)


if __name__ == "__main__":
    main()
