"""The pages of training: a loss over steps, and the curves of an RL run with what a health rule said of it."""

from __future__ import annotations

from pathlib import Path

from tasks.home.storage import read_json
from tasks.pipeline.pages import Result
from tasks.report import plots


def sft_page(result: Result, folder: Path) -> str:
    """Writes ``loss.png``."""
    plots.loss_curve(read_json(result.data / "history.json"), "sft/loss", folder / "loss.png", title=result.stage)
    return ""


def dpo_page(result: Result, folder: Path) -> str:
    """Writes ``loss.png``."""
    plots.loss_curve(read_json(result.data / "history.json"), "dpo/loss", folder / "loss.png", title=result.stage)
    return ""


def rl_page(result: Result, folder: Path) -> str:
    """Writes ``curves.png``; a run that a health rule has stopped says so."""
    history = read_json(result.data / "history.json")
    plots.training_curves(history, folder / "curves.png", title=result.stage, confidence=result.confidence)
    stopped = read_json(result.data / "health.json")["stopped"]
    return "" if stopped is None else str(stopped["text"])
