"""Page of the reward model: held-out metrics and loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlcore.tasks.drawing import plots
from rlcore.tasks.drawing.levels import format_level
from rlcore.tasks.drawing.result import Result
from rlcore.tasks.store.storage import read_json


def reward_page(result: Result, folder: Path) -> str:
    """Write ``reward_model.md`` and ``loss.png``."""
    metrics, rows = (read_json(result.data / file) for file in ("metrics.json", "reliability.json"))
    page = render(metrics, rows, confidence=result.confidence)
    (folder / "reward_model.md").write_text(page, encoding="utf-8")
    plots.loss_curve(read_json(result.data / "history.json"), "rm/loss", folder / "loss.png", title="Reward model")
    return page


def render(metrics: Mapping[str, float], rows: Sequence[Mapping[str, Any]], *, confidence: float) -> str:
    """Render the page as Markdown: held-out metrics with their intervals, and the calibration table."""

    def bounds(name: str) -> str:
        return f"{metrics[name]:.3f} [{metrics[f'{name}_low']:.3f}, {metrics[f'{name}_high']:.3f}]"

    figures = {
        "accuracy": "rm/eval_accuracy",
        "accuracy less that of the longer answer": "rm/gain_over_length",
        "calibration error": "rm/ece",
        "correlation of reward and ln length": "rm/length_correlation_overall",
        "the same within a prompt": "rm/length_correlation_within",
    }
    lengths = ("longer", "shorter", "equal")
    figures |= {f"accuracy if the chosen answer is {name}": f"rm/accuracy_when_{name}" for name in lengths}
    lines = [
        f"held-out pair accuracy {bounds('rm/eval_accuracy')} on {metrics['rm/eval_pairs']:.0f} pairs; the longer "
        f"answer: {metrics['rm/length_accuracy']:.3f}; calibration error {bounds('rm/ece')}",
        "",
        f"| held-out pairs | figure, {format_level(confidence)} interval |",
        "|---|---|",
        *(f"| {label} | {bounds(name)} |" for label, name in figures.items() if name in metrics),
        "",
        "| certainty | pairs | stated | hit rate |",
        "|---|---|---|---|",
        *(
            f"| {row['low']:.2f} to {row['high']:.2f} | {row['num_pairs']} | {row['confidence']:.3f} "
            f"| {row['accuracy']['mean']:.3f} [{row['accuracy']['low']:.3f}, {row['accuracy']['high']:.3f}] |"
            for row in rows
        ),
    ]
    return "\n".join(lines) + "\n"
