"""The short soak: after a start, nothing of a run grows with its iterations; and a figure that grows is found."""

from __future__ import annotations

import dataclasses
from contextlib import closing
from pathlib import Path

from rlcore.loop import open_run
from tests.soak.loop import Mark, make_components, recorded, slope, soak
from tests.soak.run import growing, table

FLAT = [
    Mark(
        iteration=500 * number,
        seconds=0.05 + 0.01 * number,  # of a machine that gets busier: the cost counts
        cost=80.0 + 0.1 * (number % 3),
        calls=50_000.0 + number % 2,
        kilobytes=300.0,
        resident_mib=700.0,
        descriptors=9,
        threads=5,
        checkpoint_bytes=80_000 + number % 2,
        state_bytes=2_000,
    )
    for number in range(1, 21)
]


def test_a_short_run_holds_as_much_at_its_end_as_soon_after_its_start(tmp_path: Path) -> None:
    components = make_components(tmp_path, 60, every=1)
    with closing(components.learner), recorded(tmp_path, 60) as recorder, open_run(components, recorder) as run:
        marks = soak(run, 4, say=lambda text: None)
        assert len(run.history) == 60
    first, last = marks[1], marks[-1]
    assert (last.iteration, last.descriptors, last.threads) == (60, first.descriptors, first.threads)
    # The audit's window of 64 updates fills up. A history would take 1,500 bytes an iteration.
    assert last.checkpoint_bytes - first.checkpoint_bytes < 60 * 30


def test_figures_that_stay_are_not_called_growing_and_each_that_grows_is() -> None:
    assert growing(FLAT) == []
    for name, step in (
        ("cost", 1.0),
        ("calls", 500.0),
        ("kilobytes", 5.0),
        ("resident_mib", 5.0),
        ("descriptors", 1),
        ("state_bytes", 1000),
    ):
        marks = [dataclasses.replace(mark, **{name: getattr(mark, name) + step * n}) for n, mark in enumerate(FLAT)]
        assert growing(marks) == [name]
        each, error = slope(marks, name)
        assert abs(each - 2 * step) < 0.1 * step and error < 0.1 * step
    assert table(FLAT).count("\n") == 10
