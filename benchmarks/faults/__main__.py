"""Table of faults: ``python -m benchmarks.faults [--only WORD] [--results FILE]``.

With ``--sound ITERATIONS [--dtype NAME]``: false alarms in runs without a fault. Each result is appended to the file
immediately; existing results are not computed again.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from scipy.stats import binomtest

from benchmarks.faults.lab import NUM_ITERATIONS, SCENES, STARTS, Verdict, components_of, played, prompts, start
from benchmarks.faults.outside import OUTSIDE, SOUND
from benchmarks.faults.table import RUNS
from rlcore.hardware.machine import PRECISIONS

SCENE_OF = {name: scene for scene, faults in RUNS.items() for name in faults}
FAULTS = (*SCENE_OF, *OUTSIDE)
UNDETECTED = {
    "the engine draws ends 1.6 times as often": "an end is nearly sure or nearly impossible here, so few draws change",
    "an update stops by the KL since its first epoch": "in these 40 iterations both means are on one side of the limit",
    "later: gradients of the step before are kept": "a step clears its own, so there are none; it needs a failed one",
}


def play(name: str) -> Verdict:
    """Inject a fault into its run."""
    with ExitStack() as stack:
        if name in OUTSIDE:
            return OUTSIDE[name](stack)
        scene = SCENE_OF[name]
        start(STARTS.get(scene, "start"))  # made before the fault: an error here would count as a detection
        prompts()
        RUNS[scene][name](stack)
        return played(lambda: components_of(scene))


def sound_runs(total: int, dtype: str) -> Iterator[tuple[str, Callable[[], Verdict]]]:
    """Yield names and runs without a fault, then sound stages."""
    done = seed = 0
    while done < total:
        seed += 1
        for scene, settings in SCENES.items():
            if done < total:
                make = partial(components_of, scene, seed=seed, dtype=PRECISIONS[dtype])
                yield f"{scene}, seed {seed}, {dtype}", partial(played, make)
            done += settings.get("num_iterations", NUM_ITERATIONS)
    yield from ((name, partial(each, ExitStack())) for name, each in SOUND.items())


def written(results: Path) -> dict[str, Verdict]:
    """Read a file of results, by name."""
    lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    return {row.pop("name"): Verdict(**row) for row in map(json.loads, lines)}


def found(name: str, work: Callable[[], Verdict], results: Path) -> Verdict:
    """Return the recorded result, or run ``work`` and record it."""
    known = written(results)
    if name in known:
        return known[name]
    verdict = work()
    with results.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"name": name, **asdict(verdict)}) + "\n")
    return verdict


def show_faults(only: str, results: Path) -> None:
    """Print the table of the faults whose names contain ``only``."""
    counts = Counter[str]()
    print("| fault | | after | by |\n|---|---|---|---|")
    for name in [name for name in FAULTS if only in name]:
        verdict = found(name, partial(play, name), results)
        counts[verdict.caught] += 1
        says = UNDETECTED.get(name) or verdict.message.split("\n")[0].replace("|", "\\|")[:160]
        print(f"| {name} | {verdict.caught} | {verdict.steps} | {says} |", flush=True)
    print(f"\n{counts.total()} faults: {dict(counts)}")


def show_sound(total: int, dtype: str, results: Path) -> None:
    """Print the number of healthy iterations that were stopped or warned about."""
    steps = alarms = 0
    for name, work in sound_runs(total, dtype):
        verdict = found(name, work, results)
        steps += verdict.steps
        if verdict.caught != "silent":
            alarms += 1
            print(f"{name}: {verdict.caught} after {verdict.steps}: {verdict.message}", flush=True)
    most = binomtest(alarms, steps, alternative="less").proportion_ci().high  # Clopper-Pearson
    print(f"{steps} sound iterations, {alarms} alarms: at most {most:.2g} of them at 95 %")


def main() -> None:
    """Print a table."""
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
