"""Flow: online RL, the one that the deployments `grpo` and `ppo` share."""

from __future__ import annotations

from typing import Literal

from prefect import flow

from flows.run import run_targets
from tasks.artifacts import ArtifactRef


@flow(name="online-rl", flow_run_name="{algorithm} {preset}", persist_result=False)
def online_rl(
    preset: str = "tiny", algorithm: Literal["grpo", "ppo"] = "grpo", overrides: tuple[str, ...] = ()
) -> dict[str, ArtifactRef]:
    """Train the SFT policy with the section of the preset that ``algorithm`` names."""
    return run_targets(preset, overrides, [algorithm])
