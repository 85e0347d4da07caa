"""Flow: online RL, the one that the deployments `grpo` and `ppo` share."""

from __future__ import annotations

from typing import Annotated, Literal

from prefect import flow
from pydantic import Field

from flows.parameters import Overrides, Preset
from flows.run import run_targets
from tasks.artifacts import ArtifactRef


@flow(name="online-rl", flow_run_name="{algorithm} {preset}", persist_result=False)
def online_rl(
    preset: Preset = "tiny",
    algorithm: Annotated[
        Literal["grpo", "ppo"], Field(description="The preset's section to run; its key `algorithm` names the formula.")
    ] = "grpo",
    overrides: Overrides = (),
) -> dict[str, ArtifactRef]:
    """Train the SFT policy with the section of the preset that ``algorithm`` names."""
    return run_targets(preset, overrides, [algorithm])
