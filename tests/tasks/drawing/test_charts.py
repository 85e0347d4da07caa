"""Charts: round ticks that hold every value, and drawings that are well-formed whatever they are called."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.tasks.drawing.charts import Point, Series, line_chart


def drawn(*points: Point, title: str = "t") -> ElementTree.Element:
    return ElementTree.fromstring(line_chart([Series(label="a", colour=0, points=points)], title=title))


def heights(root: ElementTree.Element) -> list[float]:
    """The places of the ticks' numbers at the left, from the lowest value up."""
    return [float(text.attrib["y"]) for text in root.iter("text") if "text-anchor: end" in text.attrib["style"]]


def ticks(root: ElementTree.Element) -> list[float]:
    texts = [text.text or "" for text in root.iter("text") if "text-anchor: end" in text.attrib["style"]]
    return [float(text.replace("−", "-")) for text in texts]


def dots(root: ElementTree.Element) -> list[ElementTree.Element]:
    return [use for use in root.iter("use") if use.find("title") is not None]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 1.0, [0.0, 0.25, 0.5, 0.75, 1.0]),
        (0.13, 0.42, [0.1, 0.2, 0.3, 0.4, 0.5]),  # 0.29 / 4 = 0.0725, the next round step is 0.1
        (3.0, 3.0, [0.0, 2.0, 4.0, 6.0]),  # a flat curve: from 0 to twice 3, in steps of 6 / 4 = 1.5, rounded to 2
        (0.0, 0.0, [0.0, 0.25, 0.5, 0.75, 1.0]),
        (-3.0, -3.0, [-6.0, -4.0, -2.0, 0.0]),
    ],
)
def test_ticks_are_round_and_enclose_the_values(low: float, high: float, expected: list[float]) -> None:
    assert ticks(drawn(Point(x=1, y=low), Point(x=2, y=high))) == pytest.approx(expected)


@settings(max_examples=25, deadline=None)
@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6))
def test_every_value_lies_between_the_lowest_and_the_highest_of_a_few_ticks(low: float, width: float) -> None:
    root = drawn(Point(x=1, y=low), Point(x=2, y=low + width))
    found = heights(root)
    assert 2 <= len(found) <= 8
    assert all(min(found) - 5 <= float(dot.attrib["y"]) <= max(found) for dot in dots(root))  # text stands 4 below


def test_a_chart_is_well_formed_and_shows_each_value_with_its_interval() -> None:
    points = [Point(x=1, y=0.5, low=0.4, high=0.6), Point(x=2, y=0.7, low=0.6, high=0.8)]
    text = line_chart([Series(label='<b>"&', colour=0, points=points)], title='a < "b"')
    root = ElementTree.fromstring(text)
    titles = [dot.findtext("title") for dot in dots(root)]
    assert titles == ['<b>"&, iteration 1: 0.5 [0.4, 0.6]', '<b>"&, iteration 2: 0.7 [0.6, 0.8]']
    assert root.attrib["aria-label"] == root.findtext("title") == 'a < "b"'
    assert text.count("fill-opacity: 0.16") == 1  # the band of the intervals


def test_a_higher_value_is_drawn_higher_and_a_later_one_further_right() -> None:
    first, last = dots(drawn(Point(x=1, y=0.0), Point(x=5, y=2.0)))
    assert float(first.attrib["x"]) < float(last.attrib["x"])
    assert float(first.attrib["y"]) > float(last.attrib["y"])


def test_colours_are_the_pages_and_nothing_comes_from_outside() -> None:
    series = [Series(label=f"{n}", colour=n, points=[Point(x=1, y=n), Point(x=2, y=n)]) for n in range(6)]
    text = line_chart(series, title="t")
    assert set(re.findall(r"var\(--(\w+)\)", text)) == {"c0", "c1", "c2", "c3", "c4", "c5", "line", "soft"}
    assert not re.findall(r"#0000|url\(|https?:|<style|xmlns| width=", text)


def test_the_same_points_give_the_same_bytes_and_two_charts_of_a_page_share_no_id() -> None:
    points = [Point(x=1, y=0.5), Point(x=2, y=0.7)]
    one, again, other = (
        line_chart([Series(label="a", colour=0, points=points)], title=title) for title in ("one", "one", "other")
    )
    assert one == again
    ids = [set(re.findall(r' id="([^"]+)"', text)) for text in (one, other)]
    assert all(ids) and not ids[0] & ids[1]


def test_without_a_point_there_is_no_chart_and_a_value_that_is_no_number_is_left_out() -> None:
    assert line_chart([], title="t") == line_chart([Series(label="a", colour=0, points=[])], title="t") == ""
    assert len(dots(drawn(Point(x=1, y=1.0), Point(x=2, y=math.nan), Point(x=3, y=2.0)))) == 2
