"""Flow: everything that a preset describes, from raw data to the comparison."""

from __future__ import annotations

from prefect import flow

from rlcore.flows.parameters import Overrides, Preset
from rlcore.flows.run import every_target, run_targets
from rlcore.tasks.store.artifacts import ArtifactRef


@flow(name="post-train", flow_run_name="post-train {preset}", persist_result=False)
def post_train(preset: Preset = "tiny", overrides: Overrides = ()) -> dict[str, ArtifactRef]:
    """Data, every stage of the graph, an evaluation of each checkpoint, the comparison: each once, cached by content.

    Args:
        preset: A committed preset such as tiny or smollm2, or the path of a .toml file on the worker's machine.
        overrides: Single keys of the preset with other values, such as stages.grpo.learning_rate=1e-4 or seed=1.
    """
    return run_targets(preset, overrides, every_target(preset, overrides))
