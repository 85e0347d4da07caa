"""Page of rejection sampling: sampled, verified and kept answers by task."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlcore.tasks.drawing.levels import format_level
from rlcore.tasks.drawing.result import Result
from rlcore.tasks.store.markdown import plain
from rlcore.tasks.store.storage import read_json


def rejection_page(result: Result, folder: Path) -> str:
    """Write ``rejection.md``."""
    summary = read_json(result.data / "rejection.json")
    yields = {"all": summary["all"], **summary["tasks"]}
    page = render(yields, summary["dropped"], confidence=result.confidence)
    (folder / "rejection.md").write_text(f"{page}\n", encoding="utf-8")
    return page


def render(yields: Mapping[str, Mapping[str, Any]], dropped: Mapping[str, int], *, confidence: float) -> str:
    """Render the summary as Markdown. ``yields``: JSON of :class:`rlcore.sampling.rejection.RejectionStats` by task."""
    lines = [
        "| task | prompts | sampled | verified | kept | accepted | pass rate "
        f"| {format_level(confidence)} interval | prompts solved |",
        "|---" * 9 + "|",
    ]
    lines += [
        f"| {plain(task)} | {each['num_prompts']} | {each['sampled']} | {each['verified']} | {each['kept']} "
        f"| {each['kept'] / each['sampled']:.3f} | {each['pass_rate']['mean']:.3f} "
        f"| [{each['pass_rate']['low']:.3f}, {each['pass_rate']['high']:.3f}] | {each['solved']['mean']:.3f} |"
        for task, each in yields.items()
    ]
    went = ", ".join(f"{count} {reason}" for reason, count in dropped.items() if count)
    return "\n".join([*lines, "", f"Not kept: {went or 'none'}."])
