"""Stages that an upgrade would run again: by cause, with the time that their results took."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from rlcore.tasks.kinds.kind import Stage
from rlcore.tasks.operations.upgrade_check import Rerun, find_reruns, format_reruns
from rlcore.tasks.pipeline.run import run_pipeline
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.presets.sections import Sections, sections_of
from rlcore.tasks.steps.base import StageContext, StageResult
from rlcore.tasks.store.cache import StageCache
from rlcore.tasks.store.settings import Home
from tests.toys import ToyConfig


@dataclass(frozen=True, kw_only=True)
class Step:
    value: int = 1


@dataclass(frozen=True, kw_only=True)
class StepsConfig(ToyConfig):
    data: Step = field(default_factory=Step)


def section(config: RunConfig) -> Sections:
    return sections_of(config, "data")


def make(context: StageContext) -> StageResult:
    (context.folder / "rows").write_text(str(context.config.data.value))
    return StageResult(metrics={})


DATA = Stage(name="data", version=1, kind="dataset", run=make, sections=section)
SFT = Stage(name="sft", version=1, kind="checkpoint", run=make, sections=section, inputs=("data",))
STAGES = (DATA, SFT)


@pytest.fixture
def ran(tracked_home: Home) -> Home:
    """The home of a run whose results took 100 s each."""
    run_pipeline(STAGES, StepsConfig.run(), ["sft"], home=tracked_home, experiment="toy")
    cache = StageCache(tracked_home.cache)
    for stage in ("data", "sft"):
        (record,) = cache.records(stage)
        cache.write(stage, replace(record, seconds=100.0))
    return tracked_home


def causes(home: Home, stages: tuple[Stage, ...] = STAGES, **changed: Any) -> Mapping[str, str]:
    return {each.stage: each.cause for each in find_reruns(stages, StepsConfig.run(**changed), home)}


def test_nothing_runs_again_without_an_upgrade(ran: Home) -> None:
    assert causes(ran) == {}
    assert format_reruns("toy", ()) == "toy: no stage with a result would run again\n"


def test_another_version_of_a_package_is_named_and_what_may_follow(ran: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlcore.tasks.pipeline.key_inputs.versions", lambda *_, **__: {"torch": "99"})
    assert causes(ran)["data"].startswith("versions changed: ")
    assert "torch" in causes(ran)["data"]


def test_another_version_of_one_stage_runs_the_next_only_if_the_result_changes(ran: Home) -> None:
    assert causes(ran, (replace(DATA, version=2), SFT)) == {
        "data": "stage changed: version",
        "sft": "if the result of a stage above changes",
    }


def test_a_change_of_the_preset_is_none_of_the_upgrade(ran: Home) -> None:
    found = causes(ran, data=Step(value=2))
    assert found == dict.fromkeys(("data", "sft"), "for reasons of the preset: see `rlcore plan`")


def test_a_stage_without_a_result_is_left_out(ran: Home) -> None:
    assert causes(ran, (*STAGES, replace(SFT, name="other"))) == {}


def test_stages_are_listed_by_cause_with_their_time() -> None:
    rows = [Rerun(stage=stage, cause=cause, seconds=100.0) for stage, cause in (("a", "x"), ("b", "y"), ("c", "x"))]
    assert format_reruns("toy", rows).splitlines() == [
        "toy: 3 stages with results would run again, 5:00 of work",
        "x",
        "  a, c: 3:20",
        "y",
        "  b: 1:40",
    ]
