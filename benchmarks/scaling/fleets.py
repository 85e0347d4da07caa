"""Fleets of 8 to 1,024 GPUs, synchronous and with prefetch, with and without failures.

Stage times are those of a model of 7.6 B parameters on H100 by the estimates of ``rlcore estimate``. Lengths have a
long tail. Failures: one in three hours on 16,384 GPUs was published (Llama 3: 419 in 54 days). A run of an hour has
none at that rate, so GPUs fail here a hundred times as often; failures are drawn ``DRAWS`` times.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from benchmarks.scaling.layouts import RUN, size_of
from benchmarks.scaling.simulation import Costs, Course, Failures, Fleet, Load, course_of, draw_batches
from rlcore.tasks.pipeline.layouts import EFFICIENCY, GPUS, IterationShape, sync_seconds, update_seconds

CARDS = (8, 16, 32, 64, 128, 256, 512, 1024)
STALENESS = (0, 1, 4)
ITERATIONS = 40
DRAWS = 100
PER_CARD = 64  # completions of a batch per GPU: the batch grows with the fleet
RATE = 1.0 / (3.0 * 3600.0 * 16_384.0)  # of a GPU, per second
FAILING = Failures(rate=100.0 * RATE)
LENGTHS = Load(sequences=0, prompt_tokens=0.0, median=800.0, spread=0.8, longest=8192)


def costs_of(ranks: int) -> Costs:
    """Return stage times of one of ``ranks``, and of a sampler on one GPU."""
    size, card = size_of("7.6 B"), GPUS["h100"]
    work = IterationShape(size=size, rl=RUN, prompt_tokens=512, recompute=True)
    speed = card.bandwidth * EFFICIENCY["decoding"]
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Fleet: results of a run without failures, and of the same batches with ``DRAWS`` draws of failures."""

    cards: int
    staleness: int
    sound: Course
    failing: list[Course]

    def speed(self, course: Course) -> float:
        """Return completion tokens per second and GPU."""
        return course.tokens / course.seconds / self.cards

    @property
    def failing_speed(self) -> tuple[float, float]:
        """Return the mean with failures, and half of its interval at 95 % (normal)."""
        speeds = [self.speed(each) for each in self.failing]
        return statistics.mean(speeds), 1.96 * statistics.stdev(speeds) / math.sqrt(len(speeds))


def rows_of(cards: int) -> Iterator[Row]:
    """Simulate runs on these numbers of GPUs, half of which learn."""
    fleet, costs = Fleet(samplers=cards // 2, ranks=cards // 2), costs_of(cards // 2)
    sequences = PER_CARD * cards
    load = replace(LENGTHS, sequences=sequences, prompt_tokens=512.0 * sequences / RUN.group_size)
    batches = draw_batches(costs, fleet, load, iterations=ITERATIONS)
    for staleness in STALENESS:
        run = partial(course_of, batches, costs, fleet, staleness=staleness)
        failing = [run(failures=FAILING, seed=seed) for seed in range(DRAWS)]
        yield Row(cards=cards, staleness=staleness, sound=run(), failing=failing)


def main() -> None:
    """Print the table."""
    rows = [row for cards in CARDS for row in rows_of(cards)]
    print("| cards | staleness | tokens/s and card | waiting | with failures: tokens/s and card | waiting | failures |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        mean, half = row.failing_speed
        idle = statistics.mean(each.idle for each in row.failing)
        count = statistics.mean(each.failures for each in row.failing)
        print(
            f"| {row.cards} | {row.staleness} | {row.speed(row.sound):.0f} | {row.sound.idle:.0%} | "
            f"{mean:.0f} ± {half:.0f} | {idle:.0%} | {count:.2f} |"
        )
