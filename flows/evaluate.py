"""Flow: held-out evaluation of one checkpoint."""

from __future__ import annotations

from prefect import flow

from rlcore.flows.parameters import Name, Overrides, Preset
from rlcore.flows.run import run_targets
from rlcore.tasks.store.artifacts import ArtifactRef


@flow(name="evaluate", flow_run_name="evaluate {preset}", persist_result=False)
def evaluate(
    preset: Preset = "tiny",
    checkpoint: Name = "sft",
    overrides: Overrides = (),
) -> dict[str, ArtifactRef]:
    """Measure greedy and sampled accuracy, with intervals, on the held-out problems.

    Args:
        preset: A built-in preset such as tiny or smollm2, or the path of a .toml file on the worker's machine.
        checkpoint: The checkpoint of the preset; it is made first if it is not cached.
        overrides: Changed keys of the preset, such as stages.grpo.learning_rate=1e-4 or seed=1.
    """
    return run_targets(preset, overrides, [f"evaluate_{checkpoint}"])
