"""Flow: import of the base."""

from __future__ import annotations

from prefect import flow

from rlcore.flows.parameters import Overrides, Preset
from rlcore.flows.run import run_targets
from rlcore.tasks.store.artifacts import ArtifactRef


@flow(name="import-sft", flow_run_name="import-sft {preset}", persist_result=False)
def import_sft(preset: Preset = "tiny", overrides: Overrides = ()) -> dict[str, ArtifactRef]:
    """Import the preset's model into the store as verified safetensors.

    Args:
        preset: A built-in preset such as tiny or smollm2, or the path of a .toml file on the worker's machine.
        overrides: Changed keys of the preset, such as stages.grpo.learning_rate=1e-4 or seed=1.
    """
    return run_targets(preset, overrides, ["import_sft"])
