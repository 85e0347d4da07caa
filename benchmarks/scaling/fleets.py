"""From 8 to 1,024 cards, synchronous and ahead, with and without failures: ``python -m benchmarks.scaling.fleets``.

Stage times are those of a model of 7.6 B parameters on H100 by the arithmetic of ``rlcore size``. Lengths have a long
tail. Failures: one in three hours on 16,384 cards is what was published (Llama 3: 419 in 54 days). A run of an hour
sees none at that rate, so cards fail here a hundred times as often.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt

from benchmarks.scaling.layouts import RUN, size_of
from benchmarks.scaling.simulation import NONE, Costs, Course, Failures, Fleet, Load, simulate
from tasks.pipeline.layouts import GPUS, REACHED, Work, sync_seconds, update_seconds

CARDS = (8, 16, 32, 64, 128, 256, 512, 1024)
STALENESS = (0, 1, 4)
ITERATIONS = 40
PER_CARD = 64  # completions of a batch: the batch grows with the fleet
RATE = 1.0 / (3.0 * 3600.0 * 16_384.0)  # of a card, per second
FAILING = Failures(rate=100.0 * RATE)
LENGTHS = Load(sequences=0, prompt_tokens=0.0, median=800.0, spread=0.8, longest=8192)


def costs_of(ranks: int) -> Costs:
    """Stage times of one of ``ranks``, and of a sampler on one card."""
    size, card = size_of("7.6 B"), GPUS["h100"]
    work = Work(size=size, rl=RUN, prompt_tokens=512, recompute=True)
    speed = card.bandwidth * REACHED["decoding"]
    cache = 2 * size.num_layers * size.keys * 2 * (512 + LENGTHS.median)
    whole = update_seconds(work, card, ranks) * ranks / work.trained_tokens
    return Costs(
        step=2 * size.num_parameters / speed + 2e-5 * size.num_layers,
        sequence=cache / speed,
        update=2.0,
        trained=whole,
        sync=sync_seconds(work, card, ranks),
        slots=256,
    )


def course(cards: int, staleness: int, failures: Failures) -> Course:
    """A run on so many cards, half of which learn."""
    fleet = Fleet(samplers=cards // 2, ranks=cards // 2)
    sequences = PER_CARD * cards
    load = replace(LENGTHS, sequences=sequences, prompt_tokens=512.0 * sequences / RUN.group_size)
    return simulate(costs_of(cards // 2), fleet, load, staleness=staleness, iterations=ITERATIONS, failures=failures)


def table() -> list[tuple[int, int, bool, Course]]:
    """Every run: cards, staleness, whether cards fail."""
    return [
        (cards, staleness, fails, course(cards, staleness, FAILING if fails else NONE))
        for cards in CARDS
        for staleness in STALENESS
        for fails in (False, True)
    ]


def plot(rows: list[tuple[int, int, bool, Course]], path: Path) -> None:
    """Tokens per second and card, and the idle share, over the number of cards."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.0, 3.4), layout="constrained")
    for staleness in STALENESS:
        for fails in (False, True):
            own = [(cards, each) for cards, k, f, each in rows if (k, f) == (staleness, fails)]
            label = f"staleness {staleness}{', failures' if fails else ''}"
            line = "--" if fails else "-"
            color = f"C{STALENESS.index(staleness)}"
            x = [cards for cards, _ in own]
            left.plot(x, [each.tokens / each.seconds / cards for cards, each in own], line, color=color, label=label)
            right.plot(x, [100.0 * each.idle for _, each in own], line, color=color)
    for axis, name in ((left, "completion tokens per second and card"), (right, "cards waiting, %")):
        axis.set(xlabel="cards", ylabel=name, xscale="log", ylim=(0, None))
        axis.set_xticks(CARDS, [str(cards) for cards in CARDS])
        axis.minorticks_off()
    left.legend(fontsize=7)
    title = "Simulated, 7.6 B on H100: stage times by arithmetic, lengths exp(N(log 800, 0.8)) up to 8,192"
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Print the table and draw the plot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plot", type=Path, default=Path(".rlcore/scaling.png"))
    rows = table()
    print("| cards | staleness | tokens/s and card | waiting | with failures: tokens/s and card | waiting | failures |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for sound, failing in zip(rows[::2], rows[1::2], strict=True):
        cards, staleness, _, each = sound
        other = failing[3]
        print(
            f"| {cards} | {staleness} | {each.tokens / each.seconds / cards:.0f} | {each.idle:.0%} | "
            f"{other.tokens / other.seconds / cards:.0f} | {other.idle:.0%} | {other.failures} |"
        )
    path: Path = parser.parse_args().plot
    path.parent.mkdir(parents=True, exist_ok=True)
    plot(rows, path)
    print(f"plot: {path}")


if __name__ == "__main__":
    main()
