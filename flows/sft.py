"""Flow: supervised fine-tuning."""

from __future__ import annotations

from prefect import flow

from flows.parameters import Overrides, Preset
from flows.run import run_targets
from tasks.home.artifacts import ArtifactRef


@flow(name="sft", flow_run_name="sft {preset}", persist_result=False)
def sft(preset: Preset = "tiny", overrides: Overrides = ()) -> dict[str, ArtifactRef]:
    """Train the imported checkpoint on the demonstrations and evaluate it.

    Args:
        preset: A committed preset such as tiny or smollm2, or the path of a .toml file on the worker's machine.
        overrides: Single keys of the preset with other values, such as grpo.learning_rate=1e-4 or seed=1.
    """
    return run_targets(preset, overrides, ["evaluate_sft"])
