"""Flow: held-out evaluation of one checkpoint."""

from __future__ import annotations

from typing import Annotated, Literal

from prefect import flow
from pydantic import Field

from flows.parameters import Overrides, Preset
from flows.run import run_targets
from tasks.artifacts import ArtifactRef


@flow(name="evaluate", flow_run_name="evaluate {preset}", persist_result=False)
def evaluate(
    preset: Preset = "tiny",
    checkpoint: Annotated[
        Literal["base", "sft", "grpo", "ppo", "sft_kept", "grpo_mixed"],
        Field(description="Which checkpoint of the preset; it is made first where it is not cached."),
    ] = "sft",
    overrides: Overrides = (),
) -> dict[str, ArtifactRef]:
    """Greedy and sampled accuracy, with intervals, on the held-out problems."""
    return run_targets(preset, overrides, [f"evaluate_{checkpoint}"])
