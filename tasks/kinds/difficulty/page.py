"""Page of pass rates: the number of prompts by pass rate."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlcore.tasks.drawing.levels import format_level
from rlcore.tasks.drawing.result import Result
from rlcore.tasks.store.markdown import plain
from rlcore.tasks.store.storage import read_json


def difficulty_page(result: Result, folder: Path) -> str:
    """Write ``difficulty.md`` and ``histogram.png``."""
    from rlcore.tasks.drawing import plots  # brings matplotlib

    summary = read_json(result.data / "difficulty.json")
    page = render(summary, confidence=result.confidence)
    (folder / "difficulty.md").write_text(page, encoding="utf-8")
    title = f"pass rates of {summary['policy']}, {summary['num_samples']} answers a prompt"
    plots.histogram(summary["histogram"], folder / "histogram.png", title=title, label="pass rate")
    return page


def render(summary: Mapping[str, Any], *, confidence: float) -> str:
    """Render the page as Markdown."""
    rate, prompts = summary["pass_rate"], summary["prompts"]
    lines = [
        f"{plain(summary['policy'])} passes {rate['mean']:.3f} of its answers, {format_level(confidence)} interval "
        f"[{rate['low']:.3f}, {rate['high']:.3f}], on {prompts} prompts with {summary['answers']} scored answers.",
        "",
        f"Never solved: {summary['never']} prompts; always: {summary['always']}; without a scored answer: "
        f"{summary['unscored']}.",
        "",
        "| task | prompts | mean pass rate |",
        "|---|---|---|",
        *(f"| {plain(task)} | {count} | {mean:.3f} |" for task, (count, mean) in summary["tasks"].items()),
        "",
        "| pass rate | prompts | fraction |",
        "|---|---|---|",
        *(f"| {value:.3f} | {count} | {count / prompts:.3f} |" for value, count in summary["histogram"]),
    ]
    return "\n".join(lines) + "\n"
