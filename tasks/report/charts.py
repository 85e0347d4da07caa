"""Line charts as inline SVG: no script, no outside resource, colours from the page's style sheet (light and dark)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 360, 200
LEFT, RIGHT, TOP, BOTTOM = 44, 10, 10, 26
_MAX_DOTS = 24  # longer curves are drawn without a dot per point


@dataclass(frozen=True, kw_only=True)
class Point:
    """One value of a curve, with its interval where there is one."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, kw_only=True)
class Series:
    """A curve; ``colour`` is the number of a class ``c0`` to ``c5`` of the page's style sheet."""

    label: str
    colour: int
    points: Sequence[Point]


@dataclass(frozen=True, kw_only=True)
class _Frame:
    """From values to places in the picture."""

    x0: float
    x1: float
    y0: float
    y1: float

    def x(self, value: float) -> float:
        return LEFT + (value - self.x0) / (self.x1 - self.x0) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.y0) / (self.y1 - self.y0) * (HEIGHT - TOP - BOTTOM)


def line_chart(series: Sequence[Series], *, title: str) -> str:
    """An SVG element; each point tells its value where the pointer rests on it. Empty without a point."""
    points = [point for each in series for point in each.points]
    if not points:
        return ""
    ends = [end for p in points for end in (p.y, p.low, p.high) if end is not None]
    ticks = nice_ticks(min(ends), max(ends))
    x0, x1 = min(p.x for p in points), max(p.x for p in points)
    frame = _Frame(x0=x0, x1=x1 if x1 > x0 else x0 + 1.0, y0=ticks[0], y1=ticks[-1])
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title, {chr(34): "&quot;"})}">',
        *_axes(frame, ticks),
        *(_band(each, frame) for each in series),
        *(line for each in series for line in _curve(each, frame)),
        "</svg>",
    ]
    return "\n".join(part for part in parts if part)


def nice_ticks(low: float, high: float, *, count: int = 4) -> list[float]:
    """A few round numbers, evenly spaced, that reach from at most ``low`` to at least ``high``."""
    if high - low < 1e-12 * max(1.0, abs(low)):
        low, high = (0.0, 2.0 * high or 1.0) if low >= 0.0 else (2.0 * low, 0.0)  # a flat curve, half way up
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1.0, 2.0, 2.5, 5.0, 10.0) if factor * power >= raw)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


def _axes(frame: _Frame, ticks: Sequence[float]) -> Iterator[str]:
    for tick in ticks:
        y = frame.y(tick)
        yield f'<line class="gridline" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text class="tick" x="{LEFT - 5}" y="{y + 3.5:.1f}" text-anchor="end">{tick:.4g}</text>'
    for value, anchor in ((frame.x0, "start"), (frame.x1, "end")):
        yield f'<text class="tick" x="{frame.x(value):.1f}" y="{HEIGHT - 10}" text-anchor="{anchor}">{value:.0f}</text>'
    middle = (LEFT + WIDTH - RIGHT) / 2
    yield f'<text class="tick" x="{middle:.1f}" y="{HEIGHT - 10}" text-anchor="middle">iteration</text>'


def _band(series: Series, frame: _Frame) -> str:
    known = [(p.x, p.low, p.high) for p in series.points if p.low is not None and p.high is not None]
    if len(known) < 2:
        return ""
    upper = [f"{frame.x(x):.1f},{frame.y(high):.1f}" for x, _, high in known]
    lower = [f"{frame.x(x):.1f},{frame.y(low):.1f}" for x, low, _ in reversed(known)]
    return f'<polygon class="band c{series.colour}" points="{" ".join(upper + lower)}"/>'


def _curve(series: Series, frame: _Frame) -> Iterator[str]:
    path = " ".join(f"{frame.x(p.x):.1f},{frame.y(p.y):.1f}" for p in series.points)
    yield f'<polyline class="curve c{series.colour}" points="{path}"/>'
    radius = 2.2 if len(series.points) <= _MAX_DOTS else 1.2
    for p in series.points:
        interval = f" [{p.low:.4g}, {p.high:.4g}]" if p.low is not None and p.high is not None else ""
        yield (
            f'<circle class="dot c{series.colour}" cx="{frame.x(p.x):.1f}" cy="{frame.y(p.y):.1f}" r="{radius}">'
            f"<title>{escape(series.label)}, iteration {p.x:.0f}: {p.y:.4g}{interval}</title></circle>"
        )
