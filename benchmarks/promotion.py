"""How often the promotion gate promotes a model that is no better, and how often one that is. Prints tables.

Answers are simulated: each problem has its own difficulty (Beta(1, 1)), and each model answers it right with that
chance, by itself. A challenger that is better is right with ``gain`` more on every problem, on average. Task slices
and lengths are simulated beside it, so that a comparison passes through every kind of check. With ``--real`` a real
checkpoint stands in: see :mod:`benchmarks.promotion_real`.
"""

from __future__ import annotations

import argparse
import time
from bisect import bisect_left
from dataclasses import dataclass

import numpy as np

from rlcore.evaluation import accuracy
from rlcore.paired import loss_p
from rlcore.promotion import Paired, Rule, alpha_of_look, judge, superiority_p

ALPHA, MIN_GAIN, TASK_MARGIN, LENGTH_MARGIN = 0.05, 0.01, 0.05, 4.0
NUM_FAST, NUM_WHOLE, NUM_POWER, NUM_SERIES, NUM_LOOKS = 4_000, 800, 400, 1_000, 10
AT_THE_MARGIN = ((0.001, 0.051), (0.02, 0.07), (0.085, 0.135), (0.25, 0.3))  # the third: 0.85 against 0.9, independent
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
        print(_row(f"{n} | gain alone", [_gains(make_world(generator, n), generator) for _ in range(NUM_FAST)]))
        print(_row(f"{n} | all", [_promoted(make_world(generator, n), generator) for _ in range(NUM_WHOLE)]))
    print(f"\nSeries of {NUM_LOOKS} challengers, none better, on the same 600 problems: share with any promotion\n")
    print("| levels | series | promoted | 95 % interval |\n|---|---|---|---|")
    for corrected in (True, False):
        series = [_series(generator, corrected=corrected) for _ in range(NUM_SERIES)]
        print(_row("alpha / (t (t + 1))" if corrected else "uncorrected: alpha / 2 at each look", series))
    print("\nA slice that is worse by exactly its margin of 5 points: chance that its guard passes, by enumeration\n")
    print(f"| problems in the slice | {' | '.join(f'won {won:g}, lost {lost:g}' for won, lost in AT_THE_MARGIN)} |")
    print("|---" * (1 + len(AT_THE_MARGIN)) + "|")
    for n in (50, 100, 200, 600):
        print(f"| {n} | {' | '.join(f'{_level_at_the_margin(n, *chances):.4f}' for chances in AT_THE_MARGIN)} |")
    print("\nA challenger that is better by 5 points: share promoted\n")
    print("| problems | look 1, gain alone | look 1, all checks | look 5, gain alone |\n|---|---|---|---|")
    for n in (200, 400, 800, 1_600, 3_200):
        worlds = [make_world(generator, n) for _ in range(NUM_POWER)]
        columns = (
            [_gains(world, generator, gain=0.05) for world in worlds],
            [_promoted(world, generator, gain=0.05) for world in worlds],
            [_gains(world, generator, gain=0.05, look=5) for world in worlds],
        )
        print(f"| {n} | {' | '.join(map(_share, columns))} |")
    print(f"\n{time.perf_counter() - started:.0f} s")


def make_world(generator: np.random.Generator, n: int) -> World:
    """Problems from 0 to 1 in difficulty, 70 % of the first task; answers of 5 to 40 tokens."""
    chance = generator.random(n)
    return World(
        chance=chance,
        task=(generator.random(n) < 0.7).astype(int),
        champion=(generator.random(n) < chance).astype(float),
        champion_length=generator.integers(5, 41, n).astype(float),
    )


def _gains(world: World, generator: np.random.Generator, *, gain: float = 0.0, look: int = 1) -> bool:
    """The gate's check of the gain alone, without its interval, which decides nothing."""
    primary = Paired(name="accuracy", champion=world.champion, challenger=_answers(world, generator, gain))
    is_enough = float((primary.challenger - primary.champion).mean()) >= MIN_GAIN
    return is_enough and superiority_p(primary, seed=0) <= alpha_of_look(ALPHA, look)


def _promoted(world: World, generator: np.random.Generator, *, gain: float = 0.0) -> bool:
    """The whole gate."""
    challenger = _answers(world, generator, gain)
    primary = Paired(name="accuracy", champion=world.champion, challenger=challenger)
    guards, rule = _guards(world, challenger, generator), Rule(alpha=ALPHA, min_gain=MIN_GAIN)
    return judge(primary, guards, (), rule=rule, look=1, seed=int(generator.integers(1 << 30))).promote


def _answers(world: World, generator: np.random.Generator, gain: float) -> np.ndarray:
    return (generator.random(len(world.chance)) < raised(world.chance, gain)).astype(float)


def raised(chance: np.ndarray, gain: float) -> np.ndarray:
    """Chances whose mean is higher by ``gain``: each moves the same part of its way to 1."""
    return chance + (1.0 - chance) * gain / max(1.0 - float(chance.mean()), gain)


def _guards(world: World, challenger: np.ndarray, generator: np.random.Generator) -> list[Paired]:
    tasks = [
        Paired(
            name=f"task {task}",
            champion=world.champion[world.task == task],
            challenger=challenger[world.task == task],
            margin=TASK_MARGIN,
        )
        for task in (0, 1)
    ]
    lengths = np.clip(world.champion_length + generator.integers(-3, 4, len(challenger)), 1, 44)
    length = Paired(
        name="length",
        champion=world.champion_length,
        challenger=lengths.astype(float),
        margin=LENGTH_MARGIN,
        higher_is_better=False,
    )
    return [*tasks, length]


def _series(generator: np.random.Generator, *, corrected: bool) -> bool:
    world = make_world(generator, 600)
    return any(_gains(world, generator, look=look if corrected else 1) for look in range(1, NUM_LOOKS + 1))


def _level_at_the_margin(n: int, won: float, lost: float) -> float:
    """Chance that a loss of the margin is "ruled out" at the first look, by the chances to be won or lost."""
    alpha, level = alpha_of_look(ALPHA, 1), 0.0
    logs = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, n + 1)))])
    reach = 8.0 * np.sqrt(n * lost) + 5.0
    for count in range(max(0, int(n * lost - reach)), min(n, int(n * lost + reach)) + 1):
        tries = range(n - count + 1)
        least = bisect_left(tries, True, key=lambda k, lost=count: loss_p(k, lost, n, TASK_MARGIN) <= alpha)
        passing = np.arange(least, n - count + 1)
        rest = n - count - passing
        ways = logs[n] - logs[passing] - logs[count] - logs[rest]
        chance = ways + passing * np.log(won) + count * np.log(lost) + rest * np.log(1.0 - won - lost)
        level += float(np.exp(chance).sum())
    return level


def _share(wins: list[bool]) -> str:
    share = accuracy(wins)
    return f"{share.mean:.2f} [{share.low:.2f}, {share.high:.2f}]"


def _row(label: str, wins: list[bool]) -> str:
    share = accuracy(wins)
    return f"| {label} | {share.n} | {share.mean:.4f} | [{share.low:.4f}, {share.high:.4f}] |"


def _real() -> bool:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--real", action="store_true", help="sample a real checkpoint against itself")
    return bool(parser.parse_args().real)


if __name__ == "__main__":
    if _real():
        from benchmarks.promotion_real import measure

        measure()
    else:
        main()
