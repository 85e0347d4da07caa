"""Flow: supervised fine-tuning."""

from __future__ import annotations

from prefect import flow

from flows.parameters import Overrides, Preset
from flows.run import run_targets
from tasks.artifacts import ArtifactRef


@flow(name="sft", flow_run_name="sft {preset}", persist_result=False)
def sft(preset: Preset = "tiny", overrides: Overrides = ()) -> dict[str, ArtifactRef]:
    """Train the imported checkpoint on the demonstrations and evaluate it."""
    return run_targets(preset, overrides, ["evaluate_sft"])
