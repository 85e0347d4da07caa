"""Charts: round ticks that hold every value, and drawings that are well-formed whatever they are called."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.report.charts import Point, Series, line_chart, nice_ticks


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.0, 1.0, [0.0, 0.25, 0.5, 0.75, 1.0]),
        (0.13, 0.42, [0.1, 0.2, 0.3, 0.4, 0.5]),  # 0.29 / 4 = 0.0725, the next round step is 0.1
        (3.0, 3.0, [0.0, 2.0, 4.0, 6.0]),  # a flat curve: from 0 to twice 3, in steps of 6 / 4 = 1.5, rounded to 2
        (0.0, 0.0, [0.0, 0.25, 0.5, 0.75, 1.0]),
    ],
)
def test_ticks_are_round_and_enclose_the_values(low: float, high: float, ticks: list[float]) -> None:
    assert nice_ticks(low, high) == pytest.approx(ticks)


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6))
def test_ticks_enclose_any_range_in_a_few_steps(low: float, width: float) -> None:
    ticks = nice_ticks(low, low + width)
    assert ticks[0] <= low + 1e-6 * width + 1e-6 and ticks[-1] >= low + width - 1e-6 * width - 1e-6
    assert 2 <= len(ticks) <= 8


def test_a_chart_is_well_formed_and_shows_each_value_with_its_interval() -> None:
    points = [Point(x=1, y=0.5, low=0.4, high=0.6), Point(x=2, y=0.7, low=0.6, high=0.8)]
    text = line_chart([Series(label='<b>"&', colour=0, points=points)], title='a < "b"')
    root = ElementTree.fromstring(text)
    titles = [element.text for element in root.iter("title")]
    assert titles == ['<b>"&, iteration 1: 0.5 [0.4, 0.6]', '<b>"&, iteration 2: 0.7 [0.6, 0.8]']
    assert root.attrib["aria-label"] == 'a < "b"'
    assert len(list(root.iter("polygon"))) == 1


def test_a_higher_value_is_drawn_higher_and_a_later_one_further_right() -> None:
    points = [Point(x=1, y=0.0), Point(x=5, y=2.0)]
    first, last = ElementTree.fromstring(line_chart([Series(label="a", colour=0, points=points)], title="t")).iter(
        "circle"
    )
    assert float(first.attrib["cx"]) < float(last.attrib["cx"])
    assert float(first.attrib["cy"]) > float(last.attrib["cy"])


def test_without_a_point_there_is_no_chart() -> None:
    assert line_chart([], title="t") == line_chart([Series(label="a", colour=0, points=[])], title="t") == ""
