"""Page of the drift gate: each column's change."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlcore.data_contracts.drift.comparison import ColumnDrift
from rlcore.strict_config import build
from rlcore.tasks.drawing.result import Result
from rlcore.tasks.kinds.drift.step import DatasetDrift, moves_of, sentence_of
from rlcore.tasks.store.markdown import plain
from rlcore.tasks.store.storage import read_json

_DIGITS = 12


def drift_page(result: Result, folder: Path) -> str:
    """Write ``drift.md``."""
    page = render([build(DatasetDrift, document) for document in read_json(result.data / "drift.json")])
    (folder / "drift.md").write_text(page, encoding="utf-8")
    return page


def render(found: Sequence[DatasetDrift]) -> str:
    """Render the page as Markdown."""
    return "# New data against the last accepted\n\n" + "\n".join(map(_section, found))


def _section(one: DatasetDrift) -> str:
    lines = [f"## {one.name}: {one.level}", "", f"{plain(sentence_of(one))}."]
    if one.columns:
        lines += [
            "",
            f"Rows {one.accepted[:_DIGITS]} accepted, {one.new[:_DIGITS]} new.",
            "",
            "| column | level | PSI | by chance | KS | by chance | mean | values | moved most |",
            "|---|---|---|---|---|---|---|---|---|",
            *map(_row, one.columns),
        ]
    if one.lost:
        lines += ["", f"The new rows lack these, or count them otherwise: {', '.join(one.lost)}."]
    if one.left_out:
        lines += ["", f"Not compared, as the accepted rows have none: {', '.join(one.left_out)}."]
    return "\n".join(lines) + "\n"


def _row(column: ColumnDrift) -> str:
    ks, by_chance = (f"{column.ks:.3f}", f"{column.ks_by_chance:.3f}") if column.means else ("–", "–")
    means = f"{column.means[0]:.1f} → {column.means[1]:.1f}" if column.means else "–"
    level = column.level if column.level == "calm" else f"**{column.level}**"
    return (
        f"| {column.column} | {level} | {column.psi:.3f} | {column.psi_by_chance:.3f} | {ks} | {by_chance} | {means} "
        f"| {column.before} → {column.after} | {plain(moves_of(column))} |"
    )
