"""The time of a run: that of stages that ran before, scaled by their own settings alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from rlcore.flows.presets import open_preset
from rlcore.tasks.preflight.preflight import time_lines
from rlcore.tasks.store.artifacts import ArtifactRef
from rlcore.tasks.store.cache import Record, StageCache
from rlcore.tasks.store.settings import Home


def home_with(folder: Path, stage: str, config: Mapping[str, object]) -> Home:
    """A state directory with one result, which took 20 s."""
    record = Record(
        key="abc",
        ref=ArtifactRef(kind="dataset", uri="artifacts/dataset/abc", sha256="0" * 64, bytes=12),
        ingredients={"machine": {}, "config": config},
        metrics={},
        code="",
        environment="",
        created="2026-01-02T03:04:05.678+00:00",
        seconds=20.0,
    )
    home = Home(folder)
    StageCache(home.cache).write(stage, record)
    return home


@pytest.mark.parametrize(
    ("stage", "config", "seconds"),
    [
        ("prepare_prompts", {}, 20),
        ("import_sft", {}, 20),
        ("compare", {"evaluation": {"max_new_tokens": 5}}, 20),
        ("grpo", {"stage": {"num_iterations": 10, "prompts_per_iteration": 4, "group_size": 2}}, 40),
    ],
)
def test_time_of_an_earlier_run_is_scaled_by_the_settings_of_its_stage(
    tmp_path: Path, stage: str, config: dict[str, object], seconds: int
) -> None:
    doubled = ["num_iterations=20", "prompts_per_iteration=4", "group_size=2", "sampling.max_new_tokens=1"]
    preset = open_preset("tiny", [f"stages.grpo.{each}" for each in doubled])
    known = f"time: about {seconds} s ({stage} {seconds} s) by earlier runs on this machine"
    home = home_with(tmp_path, stage, config)
    assert time_lines(preset, [stage], home) == [known]
    assert time_lines(preset, [stage, "ppo"], home) == [f"{known}; unknown for ppo"]


def test_a_much_smaller_run_says_nothing(tmp_path: Path) -> None:
    small = {"stage": {"num_iterations": 1, "prompts_per_iteration": 1, "group_size": 2}}
    (line,) = time_lines(open_preset("tiny"), ["grpo"], home_with(tmp_path, "grpo", small))
    assert line == "time: unknown for grpo; none of them ran on this machine before"


def test_an_estimate_above_the_budget_is_a_warning_beside_it(tmp_path: Path) -> None:
    home = home_with(tmp_path, "prepare_prompts", {})
    for hours, count in ((1.0, 1), (0.005, 2)):  # 20 s are 0.0056 h
        preset = open_preset("tiny", [f"budget.hours={hours}"])
        assert len(time_lines(preset, ["prepare_prompts"], home)) == count
