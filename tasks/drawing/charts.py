"""Line charts as SVG inside a page: matplotlib draws them, the page's style sheet colors them (light and dark).

The SVG has no script and no external resource, its labels are text, and equal points give equal bytes.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast
from xml.etree import ElementTree

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

NUM_COLOURS = 6  # the style sheet's variables --c0 to --c5
_WIDTH, _HEIGHT = 360, 200  # in coordinates of the SVG, which a page scales
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 10, 10, 30
_MAX_DOTS = 24  # longer curves have smaller dots
_STEPS = (1, 2, 2.5, 5, 10)
# Colors that stand for the page's variables: matplotlib cannot write a variable.
_VARIABLES = {f"#0000c{number}": f"var(--c{number})" for number in range(NUM_COLOURS)}
_VARIABLES |= {"#0000d0": "var(--line)", "#0000d1": "var(--soft)"}
_LINE, _SOFT = "#0000d0", "#0000d1"


@dataclass(frozen=True, kw_only=True)
class Point:
    """Value of a curve, with its interval if it has one."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, kw_only=True)
class Series:
    """Curve; ``colour`` is the number of the variable ``--c0`` to ``--c5`` of the page's style sheet."""

    label: str
    colour: int
    points: Sequence[Point]


def line_chart(series: Sequence[Series], *, title: str) -> str:
    """Return an SVG element whose points show their values under the pointer; empty without a finite point."""
    drawn = [replace(each, points=points) for each in series if (points := _finite(each.points))]
    if not drawn:
        return ""
    settings = {
        "svg.hashsalt": title,  # so that no two charts share an id in a page, and equal points give equal bytes
        "svg.fonttype": "none",
        "font.sans-serif": ["DejaVu Sans"],  # comes with matplotlib
        "font.size": 10,
        "path.simplify": False,
    }
    with mpl.rc_context(cast(Any, settings)):
        figure = Figure(figsize=(_WIDTH / 72, _HEIGHT / 72))
        axes = _axes(figure)
        for number, each in enumerate(drawn):
            _draw(axes, f"series-{number}", each)
        _limit(axes, [point for each in drawn for point in each.points])
        root = _svg(figure, title)
    groups = {group.get("id"): group for group in root.iter("g")}
    for number, each in enumerate(drawn):
        _add_tooltips(groups[f"series-{number}"], each)
    for group in root.iter("g"):  # each chart of a page has an "axes_1", and no element refers to it
        group.attrib.pop("id", None)
    text = ElementTree.tostring(root, encoding="unicode")
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, variable)
    return text


def _finite(points: Sequence[Point]) -> list[Point]:
    return [point for point in points if math.isfinite(point.y)]


def _axes(figure: Figure) -> Axes:
    width, height = 1 - (_LEFT + _RIGHT) / _WIDTH, 1 - (_TOP + _BOTTOM) / _HEIGHT
    axes = figure.add_axes((_LEFT / _WIDTH, _BOTTOM / _HEIGHT, width, height))
    axes.spines[:].set_visible(False)
    axes.grid(axis="y", color=_LINE, linewidth=1, clip_on=False)
    axes.tick_params(length=0, labelcolor=_SOFT)
    axes.set_axisbelow(True)
    axes.set_xlabel("iteration", color=_SOFT, labelpad=1)
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=(1, 2, 5, 10), integer=True))
    axes.yaxis.set_major_formatter("{x:.4g}")
    return axes


def _draw(axes: Axes, name: str, series: Series) -> None:
    points, colour = series.points, f"#0000c{series.colour}"
    known = [(p.x, p.low, p.high) for p in points if p.low is not None and p.high is not None]
    if len(known) > 1:
        x, low, high = zip(*known, strict=True)
        axes.fill_between(x, low, high, color=colour, alpha=0.16, linewidth=0, clip_on=False)
    size = 4.4 if len(points) <= _MAX_DOTS else 2.4
    places, values = [p.x for p in points], [p.y for p in points]
    (line,) = axes.plot(places, values, color=colour, linewidth=2, marker="o", markersize=size, clip_on=False)
    line.set(gid=name, markeredgewidth=0)


def _limit(axes: Axes, points: Sequence[Point]) -> None:
    first, last = min(p.x for p in points), max(p.x for p in points)
    ends = [end for p in points for end in (p.y, p.low, p.high) if end is not None]
    low, high = min(ends), max(ends)
    if high - low < 1e-12 * max(1.0, abs(low)):
        low, high = (0.0, 2.0 * high or 1.0) if low >= 0.0 else (2.0 * low, 0.0)
    ticks = MaxNLocator(4, steps=_STEPS).tick_values(low, high)
    axes.set_yticks(ticks)
    axes.set_ylim(ticks[0], ticks[-1])
    axes.set_xlim(first, last if last > first else first + 1.0)


def _svg(figure: Figure, title: str) -> ElementTree.Element:
    file = io.BytesIO()
    about = {"Title": title, "Date": None, "Creator": None, "Format": None, "Type": None}
    figure.savefig(file, format="svg", transparent=True, metadata=about)
    root = ElementTree.fromstring(file.getvalue())
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        element.attrib = {name.rpartition("}")[2]: value for name, value in element.attrib.items()}
    for element in [each for each in root if each.tag == "metadata" or each.find("style") is not None]:
        root.remove(element)
    root.attrib = {"viewBox": root.attrib["viewBox"], "role": "img", "aria-label": title}
    return root


def _add_tooltips(curve: ElementTree.Element, series: Series) -> None:
    for dot, p in zip(curve.iter("use"), series.points, strict=True):
        interval = f" [{p.low:.4g}, {p.high:.4g}]" if p.low is not None and p.high is not None else ""
        ElementTree.SubElement(dot, "title").text = f"{series.label}, iteration {p.x:.0f}: {p.y:.4g}{interval}"
