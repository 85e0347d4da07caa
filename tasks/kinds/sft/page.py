"""Page of supervised fine-tuning: its loss over steps."""

from __future__ import annotations

from pathlib import Path

from rlcore.tasks.drawing import plots
from rlcore.tasks.drawing.result import Result
from rlcore.tasks.store.storage import read_json


def sft_page(result: Result, folder: Path) -> str:
    """Write ``loss.png``."""
    plots.loss_curve(read_json(result.data / "history.json"), "sft/loss", folder / "loss.png", title=result.stage)
    return ""
