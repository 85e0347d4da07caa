"""Page of a benchmark: the mean of each task's metrics with its interval."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlcore.tasks.drawing.levels import format_level
from rlcore.tasks.drawing.result import Result
from rlcore.tasks.store.markdown import plain
from rlcore.tasks.store.storage import read_json


def benchmark_page(result: Result, folder: Path) -> str:
    """Write ``benchmark.md``."""
    page = render(read_json(result.data / "benchmark.json"), confidence=result.confidence)
    (folder / "benchmark.md").write_text(page, encoding="utf-8")
    return page


def render(summary: Mapping[str, Any], *, confidence: float) -> str:
    """Render the page as Markdown."""
    lines = [
        f"Tasks of {plain(summary['policy'])}.",
        "",
        f"| task | metric | documents | mean | {format_level(confidence)} interval |",
        "|---|---|---|---|---|",
        *(
            f"| {plain(each['task'])} | {plain(each['metric'])} | {each['n']} | {each['mean']:.3f} "
            f"| [{each['low']:.3f}, {each['high']:.3f}] |"
            for each in summary["tasks"]
        ),
    ]
    return "\n".join(lines) + "\n"
