"""Flow: the checkpoints of a preset side by side."""

from __future__ import annotations

from prefect import flow

from rlcore.flows.parameters import Overrides, Preset
from rlcore.flows.run import run_targets
from rlcore.tasks.store.artifacts import ArtifactRef


@flow(name="compare", flow_run_name="compare {preset}", persist_result=False)
def compare(preset: Preset = "tiny", overrides: Overrides = ()) -> dict[str, ArtifactRef]:
    """Compare each step of training with paired tests on the same problems.

    Args:
        preset: A committed preset such as tiny or smollm2, or the path of a .toml file on the worker's machine.
        overrides: Single keys of the preset with other values, such as stages.grpo.learning_rate=1e-4 or seed=1.
    """
    return run_targets(preset, overrides, ["compare"])
