"""Stops of an RL run by health rules: the recorded one, and that of other rules."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlcore.checks.health import HealthMonitor
from rlcore.tasks.kinds.kind import History
from rlcore.tasks.presets.sections import Sections
from rlcore.tasks.store.storage import read_json


def stop_of(history: History, config: Sections) -> Mapping[str, Any] | None:
    """Return the first stop by the health rules: its rule, its iteration, and the iteration of the result."""
    if config.health.action != "stop":
        return None
    monitor, rows = HealthMonitor(config.health), list[Mapping[str, float]]()
    for row in history:
        rows.append(row)
        report = monitor.update(rows)
        if report.stop:
            return _described(report.stop.rule, int(row["iteration"]), report.last_healthy)
    return None


def recorded(folder: Path) -> tuple[History, Mapping[str, Any] | None]:
    """Return all rows of the history in an artifact, with those after the result, and the stop."""
    history, stopped = read_json(folder / "history.json"), read_json(folder / "health.json")["stopped"]
    if stopped is None:
        return history, None
    stop = _described(stopped["rule"], stopped["iteration"], stopped["result_iteration"])
    return [*history, *stopped["dropped"]], stop


def _described(rule: str, iteration: int, result: int) -> Mapping[str, Any]:
    return {"rule": rule, "iteration": iteration, "result_iteration": result}
