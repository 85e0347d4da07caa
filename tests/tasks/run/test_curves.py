"""Tools that the preset names besides MLflow: a stage's curves, across a failure, and no part of its key."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlcore.errors import TrainingError
from rlcore.tasks.kinds.kind import Stage
from rlcore.tasks.preflight.preset_checks import tool_errors
from rlcore.tasks.presets.sections import Sections
from rlcore.tasks.presets.settings import BudgetConfig, TrackingConfig
from rlcore.tasks.run.budget import Meter
from rlcore.tasks.run.stage_runs import PipelineRun
from rlcore.tasks.run.stages import run_stage
from rlcore.tasks.steps.base import StageContext, StageResult
from rlcore.tasks.store.artifacts import ArtifactStore
from rlcore.tasks.store.cache import StageCache
from rlcore.tasks.store.settings import Home
from rlcore.tasks.tracking.runs import open_tracker
from tests.toys import ToyConfig


def train(context: StageContext) -> StageResult:
    """Fail after three steps of five; the next attempt resumes at step 2, as from a checkpoint."""
    begun = (context.work / "begun").exists()
    (context.work / "begun").touch()
    for step in range(2 if begun else 1, 6):
        context.tracker.log_metrics({"loss": 1.0 / step}, step=step)
        if step == 3 and not begun:
            raise TrainingError("the machine burns")
    (context.folder / "result").write_text("whole")
    return StageResult(metrics={"loss": 0.2, "memory": 3.0})


STAGE = Stage(name="train", version=1, kind="number", run=train, sections=lambda _: Sections({}))


def test_a_failed_stage_goes_on_in_the_same_curve_with_each_step_once(tracked_home: Home) -> None:
    config = replace(ToyConfig.run(), tracking=TrackingConfig(also=("tensorboard",)))
    tracker = open_tracker(tracked_home)
    with tracker.start_run("toy", "pipeline", tags={}) as parent:
        run = PipelineRun(
            home=tracked_home,
            store=ArtifactStore(tracked_home.root),
            cache=StageCache(tracked_home.cache),
            tracker=tracker,
            experiment="toy",
            parent=parent,
            meter=Meter(tracked_home.root / "budgets" / "toy", BudgetConfig(), 0.0),
        )
        with pytest.raises(TrainingError):
            run_stage(STAGE, config, {}, run)
        first = run_stage(STAGE, config, {}, run)
        assert run_stage(STAGE, replace(config, tracking=TrackingConfig()), {}, run) == first  # cached
    (folder,) = (tracked_home.root / "tensorboard" / config.name).iterdir()
    curves = EventAccumulator(str(folder)).Reload()
    assert [(event.step, round(event.value, 3)) for event in curves.Scalars("loss")] == [
        (1, 1.0), (2, 0.5), (3, 0.333), (4, 0.25), (5, 0.2),
    ]  # fmt: skip
    assert [(event.step, event.value) for event in curves.Scalars("memory")] == [(5, 3.0)]


def test_a_plan_names_the_extra_of_a_tool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert list(tool_errors(TrackingConfig(also=("tensorboard", "wandb", "trackio")))) == []
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(sys, "meta_path", sys.meta_path[:3])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    assert list(tool_errors(TrackingConfig(also=("wandb",)))) == [
        "tracking.also: wandb is not installed: pip install wandb"
    ]
