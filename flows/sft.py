"""Flow: supervised fine-tuning."""

from __future__ import annotations

from prefect import flow

from rlcore.flows.parameters import Name, Overrides, Preset
from rlcore.flows.run import run_targets
from rlcore.tasks.store.artifacts import ArtifactRef


@flow(name="sft", flow_run_name="sft {preset}", persist_result=False)
def sft(preset: Preset = "tiny", stage: Name = "sft", overrides: Overrides = ()) -> dict[str, ArtifactRef]:
    """Train a checkpoint on its demonstrations and evaluate it.

    Args:
        preset: A built-in preset such as tiny or smollm2, or the path of a .toml file on the worker's machine.
        stage: The stage of the preset to run, of the kind sft.
        overrides: Changed keys of the preset, such as stages.grpo.learning_rate=1e-4 or seed=1.
    """
    return run_targets(preset, overrides, [f"evaluate_{stage}"])
