"""Stage that compares the checkpoints of a run."""

from __future__ import annotations

from functools import partial

from rlcore.tasks.kinds.kind import Lazy, Stage, sections
from rlcore.tasks.presets.graph import checkpoints, contrasts, same_start_runs, stage_order
from rlcore.tasks.presets.run import RunConfig


def compare_stage(config: RunConfig) -> Stage:
    """Return the comparison stage. It reads all evaluations, and results of the kinds that have more to compare."""
    evaluations = (f"evaluate_{name}" for name in checkpoints(config))
    compared = (name for name in stage_order(config) if config.stages[name].is_compared)
    return Stage(
        name="compare",
        artifact="comparison",
        render_page=Lazy("rlcore.tasks.kinds.compare.page:comparison_page"),
        run=partial(
            Lazy("rlcore.tasks.kinds.compare.step:run_compare"),
            contrasts=contrasts(config),
            same_start_runs=same_start_runs(config),
        ),
        inputs=(*evaluations, *compared),
        sections=sections("confidence"),
    )
