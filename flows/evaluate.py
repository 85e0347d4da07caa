"""Flow: held-out evaluation of one checkpoint."""

from __future__ import annotations

from typing import Literal

from prefect import flow

from flows.run import run_targets
from tasks.artifacts import ArtifactRef


@flow(name="evaluate", flow_run_name="evaluate {preset}", persist_result=False)
def evaluate(
    preset: str = "tiny",
    checkpoint: Literal["base", "sft", "grpo", "ppo", "sft_kept", "grpo_mixed"] = "sft",
    overrides: tuple[str, ...] = (),
) -> dict[str, ArtifactRef]:
    """Greedy and sampled accuracy, with intervals, on the held-out problems."""
    return run_targets(preset, overrides, [f"evaluate_{checkpoint}"])
