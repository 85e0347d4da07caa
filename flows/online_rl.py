"""Flow: online RL, shared by the deployments of all algorithms."""

from __future__ import annotations

from prefect import flow

from rlcore.flows.parameters import Name, Overrides, Preset
from rlcore.flows.run import run_targets
from rlcore.tasks.store.artifacts import ArtifactRef


@flow(name="online-rl", flow_run_name="{stage} {preset}", persist_result=False)
def online_rl(preset: Preset = "tiny", stage: Name = "grpo", overrides: Overrides = ()) -> dict[str, ArtifactRef]:
    """Run one stage of online RL and what it needs.

    Args:
        preset: A built-in preset such as tiny or smollm2, or the path of a .toml file on the worker's machine.
        stage: The stage of the preset to run; the key `algorithm` in it names the formula.
        overrides: Changed keys of the preset, such as stages.grpo.learning_rate=1e-4 or seed=1.
    """
    return run_targets(preset, overrides, [stage])
