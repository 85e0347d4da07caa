"""How often the drift gate calls equal data moved, and how often it finds a shift. Prints tables.

Two datasets are drawn from one population of names, or the second from another, and go through sketches and judgement
as rows do. Names are equally likely, or the k-th has a weight of 1 / k (Zipf).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import pandas as pd

from data_contracts.drift.comparison import ColumnDrift, DriftLimits, judge
from data_contracts.drift.sketches import Sketch, sketch

NUM_NAMES = (2, 10, 60, 1_000, 10_000)
SIZES = ((200, 150), (2_000, 150), (20_000, 40))  # rows of each side, and comparisons
NUM_POWER = 20
OFTEN = 0.05  # a chance at which a level can be measured in seconds; the test is the same at 0.001
SEED = 0


def main() -> None:
    """Measure and print."""
    started = time.perf_counter()
    generator = np.random.default_rng(SEED)
    header = " | ".join(f"{rows:,} rows ({tries})" for rows, tries in SIZES)
    print(
        "No drift: share of columns beyond what chance gives at 0.05 (number of comparisons); all warnings at 0.001\n"
    )
    print(f"| names | distribution | {header} | warned or refused |")
    print("|---" * (3 + len(SIZES)) + "|")
    for kind in ("equal", "Zipf"):
        for names in NUM_NAMES:
            levels = [_level(generator, shares(kind, names), rows, tries) for rows, tries in SIZES]
            cells = " | ".join(f"{beyond:.3f}" for beyond, _ in levels)
            print(f"| {names:,} | {kind} | {cells} | {sum(moved for _, moved in levels)} |")
    print(f"\nA shift: share warned (refused among them), {NUM_POWER} comparisons each\n")
    print(f"| shift | {' | '.join(f'{rows:,} rows' for rows, _ in SIZES)} |")
    print("|---" * (1 + len(SIZES)) + "|")
    for label, before, after in shifts():
        cells = [_power_cell(generator, before, after, rows) for rows, _ in SIZES]
        print(f"| {label} | {' | '.join(cells)} |")
    print(f"\n{time.perf_counter() - started:.0f} s")


def shares(kind: str, names: int) -> np.ndarray:
    """Chance of each of ``names`` names: float [names]."""
    weights = np.ones(names) if kind == "equal" else 1.0 / np.arange(1, names + 1)
    return weights / weights.sum()


def shifts() -> Sequence[tuple[str, np.ndarray, np.ndarray]]:
    """What changes, and the chances of names before and after."""

    def mixed(before: np.ndarray, new: int, share: float) -> np.ndarray:
        return np.concatenate([before * (1.0 - share), np.full(new, share / new)])

    few, many, words = shares("equal", 60), shares("equal", 1_000), shares("Zipf", 10_000)
    return (
        ("none: 60 equal names", few, few),
        ("a new name takes 10 % of 60", few, mixed(few, 1, 0.1)),
        ("a new name takes 30 % of 60", few, mixed(few, 1, 0.3)),
        ("a new name takes 10 % of 10,000, Zipf", words, mixed(words, 1, 0.1)),
        ("a new name takes 30 % of 10,000, Zipf", words, mixed(words, 1, 0.3)),
        ("100 new names take half of 1,000", many, mixed(many, 100, 0.5)),
        ("1,000 new names in place of 1,000", many, mixed(many * 0.0, 1_000, 1.0)),
        ("10,000, Zipf, in the reverse order", words, words[::-1]),
    )


def drawn(generator: np.random.Generator, chances: np.ndarray, rows: int) -> dict[str, Sketch]:
    """The sketch of ``rows`` names."""
    places = generator.choice(len(chances), rows, p=chances)
    return sketch(pd.DataFrame({"source": np.char.add("name ", places.astype(str))}))


def judged(before: dict[str, Sketch], after: dict[str, Sketch], limits: DriftLimits | None = None) -> ColumnDrift:
    """The one column of both."""
    (column,) = judge(before, after, limits)
    return column


def _level(generator: np.random.Generator, chances: np.ndarray, rows: int, tries: int) -> tuple[float, int]:
    """Share beyond chance at 0.05, and how many warned or refused by the defaults."""
    beyond = moved = 0
    for _ in range(tries):
        sides = drawn(generator, chances, rows), drawn(generator, chances, rows)
        often = judged(*sides, DriftLimits(chance=OFTEN))
        beyond += often.psi > often.psi_by_chance
        moved += judged(*sides).level != "calm"
    return beyond / tries, moved


def _power_cell(generator: np.random.Generator, before: np.ndarray, after: np.ndarray, rows: int) -> str:
    levels = [judged(drawn(generator, before, rows), drawn(generator, after, rows)).level for _ in range(NUM_POWER)]
    warned, refused = sum(level != "calm" for level in levels), sum(level == "refuse" for level in levels)
    return f"{warned / NUM_POWER:.2f} ({refused / NUM_POWER:.2f})"


if __name__ == "__main__":
    main()
