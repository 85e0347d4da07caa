"""Flow: online RL, the one that the deployments of the algorithms share."""

from __future__ import annotations

from prefect import flow

from rlcore.flows.parameters import Name, Overrides, Preset
from rlcore.flows.run import run_targets
from rlcore.tasks.store.artifacts import ArtifactRef


@flow(name="online-rl", flow_run_name="{stage} {preset}", persist_result=False)
def online_rl(preset: Preset = "tiny", stage: Name = "grpo", overrides: Overrides = ()) -> dict[str, ArtifactRef]:
    """Run one stage of online RL and what it needs.

    Args:
        preset: A committed preset such as tiny or smollm2, or the path of a .toml file on the worker's machine.
        stage: Which stage of the preset to run; the key `algorithm` in it names the formula.
        overrides: Single keys of the preset with other values, such as stages.grpo.learning_rate=1e-4 or seed=1.
    """
    return run_targets(preset, overrides, [stage])
