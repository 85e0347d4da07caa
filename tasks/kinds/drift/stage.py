"""Drift gate of a retraining."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from rlcore.tasks.kinds.drift.page import drift_page
from rlcore.tasks.kinds.drift.step import run_drift
from rlcore.tasks.kinds.kind import Stage, sections
from rlcore.tasks.tracking.past import ChampionLineage


def drift_stage(data: Sequence[str], past: ChampionLineage) -> Stage:
    """Return the gate that compares the rows of the stages ``data`` with those that trained the champion."""
    return Stage(
        name="drift",
        version=1,
        kind="report",
        render_page=drift_page,
        run=partial(run_drift, accepted={name: past.datasets[name] for name in data if name in past.datasets}),
        inputs=tuple(data),
        sections=sections("retrain"),
    )
