"""Flow: read, gate and snapshot the preset's datasets."""

from __future__ import annotations

from prefect import flow

from rlcore.flows.parameters import Overrides, Preset
from rlcore.flows.presets import open_preset
from rlcore.flows.run import run_targets
from rlcore.flows.stages import datasets
from rlcore.tasks.store.artifacts import ArtifactRef


@flow(name="prepare-data", flow_run_name="prepare-data {preset}", persist_result=False)
def prepare_data(preset: Preset = "tiny", overrides: Overrides = ()) -> dict[str, ArtifactRef]:
    """Pass every dataset of the preset through its contract into a content-addressed snapshot.

    Args:
        preset: A built-in preset such as tiny or smollm2, or the path of a .toml file on the worker's machine.
        overrides: Changed keys of the preset, such as stages.grpo.learning_rate=1e-4 or seed=1.
    """
    return run_targets(preset, overrides, datasets(open_preset(preset, overrides)))
