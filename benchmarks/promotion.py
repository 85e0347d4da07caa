"""Rates at which the promotion gate promotes models that are not better, and models that are. Prints tables.

Answers are simulated: each problem has its own difficulty (Beta(1, 1)), and each model answers it correctly with that
probability, independently. A better challenger is correct with ``gain`` more on every problem, on average. Task slices
and lengths are simulated too, so that a comparison includes every kind of check.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from rlcore.evaluation.intervals import accuracy
from rlcore.evaluation.promotion import PairedMetric, PromotionRule, alpha_of_look, decide, superiority_p

ALPHA, MIN_GAIN, TASK_MARGIN, LENGTH_MARGIN = 0.05, 0.01, 0.05, 4.0
NUM_FAST, NUM_WHOLE, NUM_POWER, NUM_SERIES, NUM_LOOKS = 4_000, 800, 400, 1_000, 10
SEED = 0


@dataclass(frozen=True, kw_only=True)
class World:
    """Held-out problems [N] of two tasks with their difficulties, and the champion's answers."""

    chance: np.ndarray
    task: np.ndarray
    champion: np.ndarray
    champion_length: np.ndarray


def main() -> None:
    """Measure and print."""
    started = time.perf_counter()
    generator = np.random.default_rng(SEED)
    print("No difference between the models: share of comparisons that end in a promotion, first look\n")
    print("| problems | checks | comparisons | promoted | 95 % interval |\n|---|---|---|---|---|")
    for n in (200, 600):
        print(_row(f"{n} | gain alone", _decisions(n, NUM_FAST)))
        print(_row(f"{n} | all", _decisions(n, NUM_WHOLE, is_whole=True)))
    print(f"\nSeries of {NUM_LOOKS} challengers, none better, on the same 600 problems: share with any promotion\n")
    print("| levels | series | promoted | 95 % interval |\n|---|---|---|---|")
    for corrected in (True, False):
        series = [_series(generator, corrected=corrected) for _ in range(NUM_SERIES)]
        print(_row("alpha / (t (t + 1))" if corrected else "uncorrected: alpha / 2 at each look", series))
    print("\nA challenger that is better by 5 points: share promoted\n")
    print("| problems | look 1, gain alone | look 1, all checks | look 5, gain alone |\n|---|---|---|---|")
    for n in (200, 400, 800, 1_600):
        columns = (
            _decisions(n, NUM_POWER, gain=0.05),
            _decisions(n, NUM_POWER, gain=0.05, is_whole=True),
            _decisions(n, NUM_POWER, gain=0.05, look=5),
        )
        print(f"| {n} | {' | '.join(map(_share, columns))} |")
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
    """Return a mask of promoting comparisons, by the gain alone or by all checks; it draws its own numbers."""
    found: list[bool] = []
    for place in range(count):
        generator = np.random.default_rng([SEED, n, place])
        world = make_world(generator, n)
        challenger = _answers(world, generator, gain)
        is_better = _is_better(world, challenger, look=look)
        found.append(is_better and (not is_whole or _guarded(world, challenger, generator)))
    return found


def _is_better(world: World, challenger: np.ndarray, *, look: int = 1) -> bool:
    if float((challenger - world.champion).mean()) < MIN_GAIN:
        return False
    pair = PairedMetric(name="accuracy", champion=world.champion, challenger=challenger)
    return superiority_p(pair, seed=0) <= alpha_of_look(ALPHA, look)


def _guarded(world: World, challenger: np.ndarray, generator: np.random.Generator) -> bool:
    """Return True if all guards hold."""
    guards = _guards(world, challenger, generator)
    sure = PairedMetric(name="sure", champion=np.zeros(100), challenger=np.ones(100))
    rule = PromotionRule(alpha=ALPHA, min_gain=MIN_GAIN)
    return decide(sure, guards, (), rule=rule, look=1, seed=int(generator.integers(1 << 30))).promote


def _answers(world: World, generator: np.random.Generator, gain: float) -> np.ndarray:
    return (generator.random(len(world.chance)) < raised(world.chance, gain)).astype(float)


def raised(chance: np.ndarray, gain: float) -> np.ndarray:
    """Raise the mean of probabilities by ``gain``: each moves the same fraction of its distance to 1."""
    return chance + (1.0 - chance) * gain / max(1.0 - float(chance.mean()), gain)


def _guards(world: World, challenger: np.ndarray, generator: np.random.Generator) -> list[PairedMetric]:
    tasks = [
        PairedMetric(
            name=f"task {task}",
            champion=world.champion[world.task == task],
            challenger=challenger[world.task == task],
            margin=TASK_MARGIN,
        )
        for task in (0, 1)
    ]
    lengths = np.clip(world.champion_length + generator.integers(-3, 4, len(challenger)), 1, 44)
    length = PairedMetric(
        name="length",
        champion=world.champion_length,
        challenger=lengths.astype(float),
        margin=LENGTH_MARGIN,
        higher_is_better=False,
    )
    return [*tasks, length]


def _series(generator: np.random.Generator, *, corrected: bool) -> bool:
    world = make_world(generator, 600)
    looks = (look if corrected else 1 for look in range(1, NUM_LOOKS + 1))
    return any(_is_better(world, _answers(world, generator, 0.0), look=look) for look in looks)


def _share(wins: list[bool]) -> str:
    share = accuracy(wins)
    return f"{share.mean:.2f} [{share.low:.2f}, {share.high:.2f}]"


def _row(label: str, wins: list[bool]) -> str:
    share = accuracy(wins)
    return f"| {label} | {share.n} | {share.mean:.4f} | [{share.low:.4f}, {share.high:.4f}] |"


if __name__ == "__main__":
    main()
