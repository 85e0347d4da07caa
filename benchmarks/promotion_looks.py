"""Ways to share one chance of error among many looks at the same held-out prompts: their errors and what they find.

A look tests one challenger by right and wrong answers. A *test* turns them into a decision at a level; a *sharing* says
which level look t has. Chances of one look are enumerated; series of looks are simulated. Prints tables.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import betaln
from scipy.stats import beta, binom

from benchmarks.promotion import ALPHA, MIN_GAIN, raised
from rlcore.evaluation import accuracy
from rlcore.paired import chance_of_score
from rlcore.promotion import alpha_of_look

Counts = NDArray[np.int64]
Test = Callable[[Counts, Counts, int, float], NDArray[np.bool_]]  # won, lost, problems, level: is it better?
GAINS = {"0.20 won, 0.15 lost": (0.20, 0.15), "0.08 won, 0.03 lost": (0.08, 0.03)}
DISCORDANCES = (0.02, 0.05, 0.1, 0.25, 1 / 3, 0.5)  # at which the largest error without a gain is looked for
NUM_LOOKS, NUM_SERIES, SEED = 10, 4_000, 0


def mcnemar(won: Counts, lost: Counts, n: int, level: float) -> NDArray[np.bool_]:
    """The exact conditional test: among those that changed, each is a fair coin."""
    return np.asarray(binom.cdf(lost, won + lost, 0.5) <= level) & (won > lost)


def unconditional(won: Counts, lost: Counts, n: int, level: float) -> NDArray[np.bool_]:
    """The exact unconditional test of McNemar's statistic, as :func:`rlcore.paired.loss_p` at a margin of 0."""
    return np.asarray((won > lost) & (won - lost >= _least_score(n, level) * np.sqrt(won + lost) - 1e-9))


def bets(won: Counts, lost: Counts, n: int, level: float) -> NDArray[np.bool_]:
    """An e-value, bets of every size mixed: the mean of 2^m θ^won (1 - θ)^lost over θ in (½, 1), at least 1 / level.

    This is where a betting confidence sequence of the share won among those that changed leaves out ½.
    """
    changed = won + lost
    log_e = (changed + 1) * np.log(2.0) + betaln(won + 1, lost + 1) + beta.logsf(0.5, won + 1, lost + 1)
    return np.asarray(log_e >= -np.log(level))


def best_bet(share: float) -> Test:
    """The e-value of one who knows the true share of won among those that changed: no other grows faster."""

    def decide(won: Counts, lost: Counts, n: int, level: float) -> NDArray[np.bool_]:
        log_e = (won + lost) * np.log(2.0) + won * np.log(share) + lost * np.log1p(-share)
        return np.asarray(log_e >= -np.log(level))

    return decide


@lru_cache(maxsize=512)
def _least_score(n: int, level: float) -> float:
    low, high = 0.5, 8.0
    for _ in range(16):
        middle = (low + high) / 2.0
        low, high = (low, middle) if chance_of_score(middle, n, 0.0) <= level else (middle, high)
    return high


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """``level``: of look t, of which all together are ALPHA at most. ``recycled``: a promotion's level goes on."""

    name: str
    level: Callable[[int], float]
    recycled: bool = False


def _falling(look: int) -> float:
    return alpha_of_look(ALPHA, look)


SHARINGS = (
    Sharing(name="α / (t (t + 1))", level=_falling),
    Sharing(name="α t^-1.5 / 2.612", level=lambda look: ALPHA * look**-1.5 / 2.612376),
    Sharing(name="α 2^-t", level=lambda look: ALPHA * 0.5**look),
    Sharing(name=f"α / {NUM_LOOKS}, then none", level=lambda look: ALPHA / NUM_LOOKS),
    Sharing(name="α / (t (t + 1)), recycled", level=_falling, recycled=True),
)


def chance(test: Test, n: int, level: float, won: float, lost: float) -> float:
    """That a look promotes, by enumeration, where a problem is won and lost with these chances."""
    total, changes = 0.0, np.arange(n + 1)
    weights = binom.pmf(changes, n, won + lost)
    for changed in changes[weights > 1e-12]:
        fewer = np.arange(changed + 1)
        passed = test(changed - fewer, fewer, n, level) & (changed - 2 * fewer >= MIN_GAIN * n - 1e-9)
        total += float(weights[changed] * binom.pmf(fewer, changed, lost / (won + lost))[passed].sum())
    return total


def series(test: Test, sharing: Sharing, n: int, *, better: float) -> tuple[list[bool], list[int]]:
    """Whether each series of looks has a false promotion, and its number of right ones.

    A challenger is better than the champion of its moment by 5 points with the chance ``better``, else equal to it.
    """
    generator = np.random.default_rng(SEED)
    shape = (NUM_SERIES, n)
    chances = generator.random(shape)
    champion = generator.random(shape) < chances
    erred, found, spare = np.zeros(NUM_SERIES, bool), np.zeros(NUM_SERIES, int), np.zeros(NUM_SERIES)
    for look in range(1, NUM_LOOKS + 1):
        is_better = generator.random(NUM_SERIES) < better
        own = np.where(is_better[:, None], np.stack([raised(row, 0.05) for row in chances]), chances)
        answers = generator.random(shape) < own
        won, lost = (answers & ~champion).sum(axis=1), (~answers & champion).sum(axis=1)
        levels = sharing.level(look) + spare
        promoted = np.zeros(NUM_SERIES, bool)
        for level in np.unique(levels):
            here = levels == level
            promoted[here] = test(won[here], lost[here], n, float(level))
        promoted &= won - lost >= MIN_GAIN * n - 1e-9
        spare = np.where(promoted, levels, 0.0) if sharing.recycled else spare
        erred |= promoted & ~is_better
        found += promoted & is_better
        champion = np.where(promoted[:, None], answers, champion)
        chances = np.where(promoted[:, None], own, chances)
    return erred.tolist(), found.tolist()


def print_tests() -> None:
    """One look: the largest error without a gain, and power."""
    tests = {"McNemar, conditional": mcnemar, "unconditional": unconditional, "mixed bets": bets}
    for name, (won, lost) in GAINS.items():
        print(f"\nBetter by 5 points, {name}: share promoted (the largest share where nothing is better)\n")
        all_tests = {**tests, "the best bet": best_bet(won / (won + lost))}
        print(f"| problems | look | level | {' | '.join(all_tests)} |\n|---|---|---{'|---' * len(all_tests)}|")
        for n in (200, 400, 800):
            for look in (1, 2, 5, 10):
                level, cells = _falling(look), []
                for test in all_tests.values():
                    largest = max(chance(test, n, level, each / 2, each / 2) for each in DISCORDANCES)
                    cells.append(f"{chance(test, n, level, won, lost):.3f} ({largest:.5f})")
                print(f"| {n} | {look} | {level:.5f} | {' | '.join(cells)} |")


def print_sharings() -> None:
    """The unconditional test at each sharing, look by look."""
    won, lost = GAINS["0.20 won, 0.15 lost"]
    looks = (1, 2, 3, 5, 10)
    print("\nUnconditional test, better by 5 points (0.20 won, 0.15 lost): share promoted at look\n")
    print(f"| problems | levels | {' | '.join(map(str, looks))} |\n|---|---{'|---' * len(looks)}|")
    for n in (200, 800):
        for sharing in SHARINGS[:4]:
            found = (chance(unconditional, n, sharing.level(look), won, lost) for look in looks)
            print(f"| {n} | {sharing.name} | {' | '.join(f'{each:.3f}' for each in found)} |")


def print_series() -> None:
    """Ten looks: any false promotion, and right promotions."""
    arms = [(mcnemar, SHARINGS[0], "McNemar"), (bets, SHARINGS[0], "mixed bets")]
    arms += [(unconditional, sharing, "unconditional") for sharing in SHARINGS]
    print(f"\n{NUM_SERIES} series of {NUM_LOOKS} looks: share with a false promotion, right promotions per series\n")
    print("| problems | test | levels | false, none better | false, half better | right, half better |")
    print("|---|---|---|---|---|---|")
    for n in (200, 600):
        for test, sharing, name in arms:
            equal, _ = series(test, sharing, n, better=0.0)
            mixed, found = series(test, sharing, n, better=0.5)
            mean, half = float(np.mean(found)), 1.96 * float(np.std(found)) / NUM_SERIES**0.5
            right = f"{mean:.3f} [{mean - half:.3f}, {mean + half:.3f}]"
            print(f"| {n} | {name} | {sharing.name} | {_share(equal)} | {_share(mixed)} | {right} |")


def _share(errors: list[bool]) -> str:
    share = accuracy(errors)
    return f"{share.mean:.4f} [{share.low:.4f}, {share.high:.4f}]"


def main() -> None:
    """Measure and print."""
    started = time.perf_counter()
    print_tests()
    print_sharings()
    print_series()
    print(f"\n{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
