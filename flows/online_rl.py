"""Flow: online RL, the one that the deployments `grpo` and `ppo` share."""

from __future__ import annotations

from typing import Literal

from prefect import flow

from flows.parameters import Overrides, Preset
from flows.run import run_targets
from tasks.home.artifacts import ArtifactRef


@flow(name="online-rl", flow_run_name="{algorithm} {preset}", persist_result=False)
def online_rl(
    preset: Preset = "tiny", algorithm: Literal["grpo", "ppo"] = "grpo", overrides: Overrides = ()
) -> dict[str, ArtifactRef]:
    """Train the SFT policy with the section of the preset that ``algorithm`` names.

    Args:
        preset: A committed preset such as tiny or smollm2, or the path of a .toml file on the worker's machine.
        algorithm: Which section of the preset to run; the key `algorithm` in it names the formula.
        overrides: Single keys of the preset with other values, such as grpo.learning_rate=1e-4 or seed=1.
    """
    return run_targets(preset, overrides, [algorithm])
