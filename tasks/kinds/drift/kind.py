"""Drift gate of a retraining."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from rlcore.tasks.kinds.kind import Lazy, Stage, sections

if TYPE_CHECKING:
    from rlcore.tasks.tracking.lineage import ChampionLineage


def drift_stage(data: Sequence[str], past: ChampionLineage) -> Stage:
    """Return the gate that compares the rows of the stages ``data`` with those that trained the champion."""
    return Stage(
        name="drift",
        artifact="report",
        render_page=Lazy("rlcore.tasks.kinds.drift.page:drift_page"),
        run=partial(
            Lazy("rlcore.tasks.kinds.drift.step:run_drift"),
            accepted={name: past.datasets[name] for name in data if name in past.datasets},
        ),
        inputs=tuple(data),
        sections=sections("retrain"),
    )
