"""Page of the reward model: held-out metrics and loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rlcore.strict_config import build
from rlcore.tasks.drawing import plots
from rlcore.tasks.drawing.levels import format_level
from rlcore.tasks.drawing.result import Result
from rlcore.tasks.store.storage import read_json
from rlcore.training.reward_calibration import ReliabilityBin

LENGTHS = ("longer", "shorter", "equal")


def reward_page(result: Result, folder: Path) -> str:
    """Write ``reward_model.md`` and ``loss.png``."""
    rows = [build(ReliabilityBin, document) for document in read_json(result.data / "reliability.json")]
    page = render(read_json(result.data / "metrics.json"), rows, confidence=result.confidence)
    (folder / "reward_model.md").write_text(page, encoding="utf-8")
    plots.loss_curve(read_json(result.data / "history.json"), "rm/loss", folder / "loss.png", title="Reward model")
    return page


def describe(metrics: Mapping[str, float]) -> str:
    """Summarize the reward model in one line."""
    return (
        f"held-out pair accuracy {_bounds(metrics, 'rm/eval_accuracy')} on {metrics['rm/eval_pairs']:.0f} pairs; "
        f"the longer answer: {metrics['rm/length_accuracy']:.3f}; calibration error {_bounds(metrics, 'rm/ece')}"
    )


def _bounds(metrics: Mapping[str, float], name: str) -> str:
    return f"{metrics[name]:.3f} [{metrics[f'{name}_low']:.3f}, {metrics[f'{name}_high']:.3f}]"


def render(metrics: Mapping[str, float], rows: Sequence[ReliabilityBin], *, confidence: float) -> str:
    """Render the page as Markdown: each metric with its interval, and the calibration table."""
    figures = {
        "accuracy": "rm/eval_accuracy",
        "accuracy less that of the longer answer": "rm/gain_over_length",
        "calibration error": "rm/ece",
        "correlation of reward and ln length": "rm/length_correlation_overall",
        "the same within a prompt": "rm/length_correlation_within",
    }
    figures |= {f"accuracy if the chosen answer is {name}": f"rm/accuracy_when_{name}" for name in LENGTHS}
    lines = [f"| held-out pairs | figure, {format_level(confidence)} interval |", "|---|---|"]
    lines += [f"| {label} | {_bounds(metrics, name)} |" for label, name in figures.items() if name in metrics]
    lines += ["", "| certainty | pairs | stated | hit rate |", "|---|---|---|---|"]
    lines += [
        f"| {row.low:.2f} to {row.high:.2f} | {row.num_pairs} | {row.confidence:.3f} "
        f"| {row.accuracy.mean:.3f} [{row.accuracy.low:.3f}, {row.accuracy.high:.3f}] |"
        for row in rows
    ]
    return "\n".join([describe(metrics), "", *lines]) + "\n"
