"""Picture of a model's lineage: raw data on the left, the model on the right, an arrow from each input."""

from __future__ import annotations

from pathlib import Path
from textwrap import shorten

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle
from matplotlib.path import Path as Curve

from rlcore.tasks.drawing.charts import svg_settings
from rlcore.tasks.tracking.lineage import DIGITS, Ancestor

_WIDTH, _HEIGHT, _GAP = 250, 64, 26  # size of a box and distance between boxes, in points
_LETTERS = 50  # characters in a line of a box
_CURVE = (Curve.MOVETO, Curve.CURVE4, Curve.CURVE4, Curve.CURVE4)


def draw(root: Ancestor, path: Path) -> None:
    """Write the graph as an SVG file, in which each result appears once."""
    columns = _columns(root)
    places = {
        node: (column * (_WIDTH + 2 * _GAP) + _GAP, row * (_HEIGHT + _GAP) + _GAP)
        for column, nodes in enumerate(columns)
        for row, node in enumerate(nodes)
    }
    width, height = len(columns) * (_WIDTH + 2 * _GAP), max(map(len, columns)) * (_HEIGHT + _GAP) + _GAP
    with svg_settings(root.sha256):
        figure = Figure(figsize=(width / 72, height / 72))
        axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
        axes.set_axis_off()
        for node, place in places.items():
            _box(axes, node, *place)
            for parent in dict.fromkeys(node.parents):
                _arrow(axes, places[parent], place)
        about = {"Title": f"lineage of {root.stage}", "Date": None, "Creator": None}
        figure.savefig(path, format="svg", metadata=about)


def _box(axes: Axes, node: Ancestor, x: int, y: int) -> None:
    box = Rectangle((x, y), _WIDTH, _HEIGHT, facecolor="#eef3fa", edgecolor="#444466", zorder=2)  # above the arrows
    box.set_gid(f"box {node.sha256}")
    axes.add_patch(box)
    lines = [f"{node.stage} {node.sha256[:DIGITS]}", *node.facts[-4:-1]]
    for number, line in enumerate(lines):
        text = shorten(line, _LETTERS, placeholder=" …")
        axes.text(x + 8, y + 16 + 14 * number, text, fontsize=10 if number == 0 else 8, parse_math=False)


def _arrow(axes: Axes, start: tuple[int, int], end: tuple[int, int]) -> None:
    """Draw an arrow from the right side of the box ``start`` to the left side of the box ``end``."""
    x1, y1, x2, y2 = start[0] + _WIDTH, start[1] + _HEIGHT / 2, end[0], end[1] + _HEIGHT / 2
    middle = (x1 + x2) / 2
    curve = Curve([(x1, y1), (middle, y1), (middle, y2), (x2, y2)], _CURVE)
    arrow = FancyArrowPatch(path=curve, arrowstyle="-|>", mutation_scale=9, color="#888899", zorder=1)
    arrow.set_gid("arrow")
    axes.add_patch(arrow)


def _columns(root: Ancestor) -> list[list[Ancestor]]:
    """Return the nodes in columns by the length of their longest path from the raw data."""
    depths: dict[Ancestor, int] = {}

    def depth(node: Ancestor) -> int:
        if node not in depths:
            depths[node] = 1 + max((depth(parent) for parent in node.parents), default=-1)
        return depths[node]

    last = depth(root)
    return [[node for node, place in depths.items() if place == column] for column in range(last + 1)]
