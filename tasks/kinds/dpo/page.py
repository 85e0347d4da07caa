"""Page of a DPO stage: its loss over steps."""

from __future__ import annotations

from pathlib import Path

from rlcore.tasks.drawing import plots
from rlcore.tasks.drawing.result import Result
from rlcore.tasks.store.storage import read_json


def dpo_page(result: Result, folder: Path) -> str:
    """Write ``loss.png``."""
    plots.loss_curve(read_json(result.data / "history.json"), "dpo/loss", folder / "loss.png", title=result.stage)
    return ""
