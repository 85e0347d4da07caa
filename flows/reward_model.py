"""Flow: reward-model training."""

from __future__ import annotations

from prefect import flow

from rlcore.flows.parameters import Name, Overrides, Preset
from rlcore.flows.run import run_targets
from rlcore.tasks.store.artifacts import ArtifactRef


@flow(name="reward-model", flow_run_name="reward-model {preset}", persist_result=False)
def reward_model(
    preset: Preset = "tiny", stage: Name = "reward_model", overrides: Overrides = ()
) -> dict[str, ArtifactRef]:
    """Train a reward model on its preference pairs and test it.

    Args:
        preset: A built-in preset such as tiny or smollm2, or the path of a .toml file on the worker's machine.
        stage: The stage of the preset to run, of the kind reward_model.
        overrides: Changed keys of the preset, such as stages.grpo.learning_rate=1e-4 or seed=1.
    """
    return run_targets(preset, overrides, [stage])
