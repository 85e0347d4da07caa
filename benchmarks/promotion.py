"""Rates at which the promotion gate promotes models that are not better, and models that are. Prints tables.

Each problem has its own difficulty (Beta(1, 1)), and models answer it correctly with that probability, independently; a
better challenger with ``gain`` more on average. Task slices and lengths are simulated too, for every kind of check.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.report import table
from rlcore.evaluation.intervals import accuracy
from rlcore.evaluation.promotion import PairedMetric, PromotionRule, alpha_of_look, decide, superiority_p

ALPHA, MIN_GAIN, TASK_MARGIN, LENGTH_MARGIN = 0.05, 0.01, 0.05, 4.0
NUM_LOOKS = 10
SEED = 0


@dataclass(frozen=True, kw_only=True)
class World:
    """Held-out problems [N] of two tasks with their difficulties, and the champion's answers."""

    chance: np.ndarray
    task: np.ndarray
    champion: np.ndarray
    champion_length: np.ndarray

    def answers(self, generator: np.random.Generator, gain: float = 0.0) -> np.ndarray:
        """Draw a challenger's answers; each chance moves the same fraction of its distance to 1."""
        raised = self.chance + (1.0 - self.chance) * gain / max(1.0 - float(self.chance.mean()), gain)
        return (generator.random(len(raised)) < raised).astype(float)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--comparisons", type=int, default=4000, help="of the first table; others have fewer")
    count = parser.parse_args().comparisons
    started, generator = time.perf_counter(), np.random.default_rng(SEED)
    print("No difference between the models: share of comparisons that end in a promotion, first look\n")
    rows: list[tuple[str, ...]] = [(str(n), "gain alone", *_rate(_decisions(n, count))) for n in (200, 600)]
    rows += [(str(n), "all", *_rate(_decisions(n, count // 5, is_whole=True))) for n in (200, 600)]
    print(table(("problems", "checks", "comparisons", "promoted", "95 % interval"), rows))
    print(f"\nSeries of {NUM_LOOKS} challengers, none better, on the same 600 problems: share with any promotion\n")
    names = {True: "alpha / (t (t + 1))", False: "uncorrected: alpha / 2 at each look"}
    series = {name: [_series(generator, corrected=key) for _ in range(count // 4)] for key, name in names.items()}
    rows = [(name, *_rate(found)) for name, found in series.items()]
    print(table(("levels", "series", "promoted", "95 % interval"), rows))
    print("\nA challenger that is better by 5 points: share promoted\n")
    rows = []
    for n in (200, 400, 800, 1_600):
        kinds: tuple[dict[str, Any], ...] = ({"look": 1}, {"is_whole": True}, {"look": 5})
        rates = [_rate(_decisions(n, count // 10, gain=0.05, **kind)) for kind in kinds]
        rows.append((str(n), *(f"{mean} {ends}" for _, mean, ends in rates)))
    print(table(("problems", "look 1, gain alone", "look 1, all checks", "look 5, gain alone"), rows))
    print(f"\n{time.perf_counter() - started:.0f} s")


def make_world(generator: np.random.Generator, n: int) -> World:
    """Make problems with difficulties from 0 to 1, 70 % of the first task; answers of 5 to 40 tokens."""
    chance = generator.random(n)
    return World(
        chance=chance,
        task=(generator.random(n) < 0.7).astype(int),
        champion=(generator.random(n) < chance).astype(float),
        champion_length=generator.integers(5, 41, n).astype(float),
    )


def _decisions(n: int, count: int, *, gain: float = 0.0, look: int = 1, is_whole: bool = False) -> list[bool]:
    """Return a mask of promoting comparisons, by the gain alone or by all checks."""
    found: list[bool] = []
    for place in range(count):
        generator = np.random.default_rng([SEED, n, place])
        world = make_world(generator, n)
        challenger = world.answers(generator, gain)
        is_better = _is_better(world, challenger, look=look)
        found.append(is_better and (not is_whole or _guarded(world, challenger, generator)))
    return found


def _is_better(world: World, challenger: np.ndarray, *, look: int = 1) -> bool:
    if float((challenger - world.champion).mean()) < MIN_GAIN:
        return False
    pair = PairedMetric(name="accuracy", champion=world.champion, challenger=challenger)
    return superiority_p(pair, seed=0) <= alpha_of_look(ALPHA, look)


def _guarded(world: World, challenger: np.ndarray, generator: np.random.Generator) -> bool:
    lengths = np.clip(world.champion_length + generator.integers(-3, 4, len(challenger)), 1, 44).astype(float)
    sides: dict[str, Any] = {"champion": world.champion_length, "challenger": lengths}
    guards = [PairedMetric(name="length", margin=LENGTH_MARGIN, higher_is_better=False, **sides)]
    for task in (0, 1):
        sides = {"champion": world.champion[world.task == task], "challenger": challenger[world.task == task]}
        guards.append(PairedMetric(name=f"task {task}", margin=TASK_MARGIN, **sides))
    sure = PairedMetric(name="sure", champion=np.zeros(100), challenger=np.ones(100))
    rule = PromotionRule(alpha=ALPHA, min_gain=MIN_GAIN)
    return decide(sure, guards, (), rule=rule, look=1, seed=int(generator.integers(1 << 30))).promote


def _series(generator: np.random.Generator, *, corrected: bool) -> bool:
    world = make_world(generator, 600)
    looks = (look if corrected else 1 for look in range(1, NUM_LOOKS + 1))
    return any(_is_better(world, world.answers(generator), look=look) for look in looks)


def _rate(wins: list[bool]) -> tuple[str, str, str]:
    found = accuracy(wins)
    return str(found.n), f"{found.mean:.4f}", f"[{found.low:.4f}, {found.high:.4f}]"


if __name__ == "__main__":
    main()
