"""Page of online RL: training curves and findings of health rules."""

from __future__ import annotations

from pathlib import Path

from rlcore.tasks.drawing import plots
from rlcore.tasks.drawing.over_optimisation import points, summary_text
from rlcore.tasks.drawing.result import Result
from rlcore.tasks.store.storage import read_json


def rl_page(result: Result, folder: Path) -> str:
    """Write ``curves.png``, and ``over_optimisation`` (``.png``, ``.md``) if the KL is measured and evaluations recur.

    The page of a run that a health rule stopped begins with the reason.
    """
    history = read_json(result.data / "history.json")
    plots.training_curves(history, folder / "curves.png", title=result.stage, confidence=result.confidence)
    stopped = read_json(result.data / "health.json")["stopped"]
    lines = [] if stopped is None else [str(stopped["text"])]
    if len(found := points(history)) > 1:
        plots.paid_and_held_out(found, folder / "over_optimisation.png", title=result.stage)
        lines.append(summary_text(found, confidence=result.confidence))
        (folder / "over_optimisation.md").write_text(lines[-1] + "\n", encoding="utf-8")
    return "\n\n".join(lines)
