"""Flow: comparison of challenger and champion, and the promotion."""

from __future__ import annotations

from prefect import flow

from rlcore.flows.parameters import Overrides, Preset
from rlcore.flows.run import run_promotion
from rlcore.tasks.store.artifacts import ArtifactRef


@flow(name="promote", flow_run_name="promote {preset}", persist_result=False)
def promote(preset: Preset = "tiny", overrides: Overrides = ()) -> dict[str, ArtifactRef]:
    """Evaluate both on the same held-out prompts, write the decision, move the aliases.

    Args:
        preset: A built-in preset such as tiny or smollm2, or the path of a .toml file on the worker's machine.
        overrides: Changed keys of the preset, such as stages.grpo.learning_rate=1e-4 or seed=1.
    """
    return run_promotion(preset, overrides)
