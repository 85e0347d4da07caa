"""Flow: reward-model training."""

from __future__ import annotations

from prefect import flow

from flows.parameters import Overrides, Preset
from flows.run import run_targets
from tasks.artifacts import ArtifactRef


@flow(name="reward-model", flow_run_name="reward-model {preset}", persist_result=False)
def reward_model(preset: Preset = "tiny", overrides: Overrides = ()) -> dict[str, ArtifactRef]:
    """Train and judge the reward model on the preset's preferences."""
    return run_targets(preset, overrides, ["reward_model"])
