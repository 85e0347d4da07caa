"""The arithmetic and the simulation of scaling."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.scaling.fleets import Row
from benchmarks.scaling.layouts import SHAPES, size_of, table
from benchmarks.scaling.simulation import Costs, Course, Failures, Fleet, Load, decode_seconds, simulate
from tests.architecture.source_files import ROOT


def test_the_table_of_layouts_is_that_of_the_code() -> None:
    """``python -m benchmarks.scaling.layouts`` prints it; docs/benchmarks/scaling.md has it."""
    assert table() in (ROOT / "docs" / "benchmarks" / "scaling.md").read_text(encoding="utf-8")


def test_shapes_have_about_as_many_parameters_as_their_names_say() -> None:
    for name in SHAPES:
        billions = float(name.split()[0])
        assert abs(size_of(name).num_parameters / 1e9 - billions) < 0.06 * billions


COSTS = Costs(step=1.0, sequence=0.5, update=10.0, trained=0.25, sync=2.0, slots=2)
EVEN = Load(sequences=4, prompt_tokens=8.0, median=3.0, spread=0.0, longest=9)
TAILED = Load(sequences=64, prompt_tokens=0.0, median=20.0, spread=1.0, longest=400)
LONG = replace(COSTS, step=0.1, sequence=0.0, update=0.0, trained=0.01, slots=8)


def test_decoding_by_hand() -> None:
    # Two slots. Lengths 1, 3, 2: one step of two, then the third takes the slot: two steps of two. 3 * (1 + 0.5 * 2).
    assert decode_seconds([1, 3, 2], COSTS) == pytest.approx(6.0)
    # 1, 4: one step of two, three of one: 2 + 3 * 1.5.
    assert decode_seconds([1, 4], COSTS) == pytest.approx(6.5)
    assert decode_seconds([], COSTS) == 0.0


def test_an_iteration_by_hand() -> None:
    # Two samplers with two completions of 3 each: 3 steps of 1 + 0.5 * 2 = 6 s. An update of 20 tokens by one rank:
    # 10 + 0.25 * 20 = 15 s, then 2 s of sync. One after another: 23 s. Ahead: 6, then 17 s for each update.
    fleet = Fleet(samplers=2, ranks=1)
    assert simulate(COSTS, fleet, EVEN, staleness=0, iterations=3).seconds == pytest.approx(3 * 23.0)
    assert simulate(COSTS, fleet, EVEN, staleness=1, iterations=3).seconds == pytest.approx(6.0 + 3 * 17.0)
    course = simulate(COSTS, fleet, EVEN, staleness=0, iterations=3)
    assert course.idle == pytest.approx(1.0 - (2 * 6.0 + 15.0) / (3 * 23.0))  # of three cards
    # On two cores two samplers are as fast as one on one; four take twice as long as they would on four.
    four = simulate(COSTS, Fleet(samplers=4, ranks=1, cores=2), EVEN, staleness=0, iterations=1)
    assert four.seconds == pytest.approx(2 * 3 * 1.5 + 17.0)
    # Two samplers as above; four ranks on two cores each take twice as long for the fixed part and for 5 tokens each.
    ranks = simulate(COSTS, Fleet(samplers=2, ranks=4, cores=2), EVEN, staleness=0, iterations=1)
    assert ranks.seconds == pytest.approx(6.0 + 2 * (10.0 + 0.25 * 5) + 2.0)


@pytest.mark.parametrize("samplers", [1, 4])
def test_long_tails_cost_less_the_further_the_engine_is_ahead(samplers: int) -> None:
    fleet = Fleet(samplers=samplers, ranks=1)
    seconds = [simulate(LONG, fleet, TAILED, staleness=k, iterations=60).seconds for k in (0, 1, 2, 8)]
    assert seconds == sorted(seconds, reverse=True) and seconds[0] > 1.2 * seconds[1] > 1.2 * seconds[3]
    same = [simulate(LONG, fleet, TAILED, staleness=k, iterations=60).tokens for k in (0, 8)]
    assert same[0] == same[1]


def test_failures_cost_time_and_change_no_batch() -> None:
    fleet = Fleet(samplers=4, ranks=4)
    failing = Failures(rate=1e-4, restart=10.0, checkpoint=50.0)
    sound = simulate(LONG, fleet, TAILED, staleness=1, iterations=60)
    other = simulate(LONG, fleet, TAILED, staleness=1, iterations=60, failures=failing)
    assert other.failures > 0 == sound.failures
    assert other.seconds > sound.seconds and other.tokens == sound.tokens and other.idle > sound.idle


def test_speeds_with_failures_by_hand() -> None:
    # 40 tokens by two cards in 10 and in 20 s: 2 and 1 tokens per second and card. Deviation 0.707, so 1.96 * 0.5.
    fast, slow = (Course(seconds=seconds, tokens=40, idle=0.0, failures=0) for seconds in (10.0, 20.0))
    row = Row(cards=2, staleness=0, sound=fast, failing=[fast, slow])
    assert row.failing_speed == pytest.approx((1.5, 0.98))
