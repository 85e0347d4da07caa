"""The estimated time of a run: stages that ran before are scaled by their own settings alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from rlcore.flows.presets import open_preset
from rlcore.tasks.pipeline.time_plan import time_lines
from rlcore.tasks.store.artifacts import ArtifactRef
from rlcore.tasks.store.cache import Record, StageCache


def cache_with(folder: Path, stage: str, config: Mapping[str, object]) -> StageCache:
    """A cache with one result, which took 20 s."""
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
    cache = StageCache(folder)
    cache.write(stage, record)
    return cache


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
    line = f"time: about {seconds} s ({stage} {seconds} s); estimated from earlier runs on this machine"
    assert time_lines(preset, None, [stage], cache_with(tmp_path, stage, config)) == [line]


def test_a_much_smaller_run_says_nothing(tmp_path: Path) -> None:
    small = {"stage": {"num_iterations": 1, "prompts_per_iteration": 1, "group_size": 2}}
    assert time_lines(open_preset("tiny"), None, ["grpo"], cache_with(tmp_path, "grpo", small)) == []
