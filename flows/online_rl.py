"""Flow: online RL, shared by the deployments of all algorithms."""

from __future__ import annotations

import json
from typing import Any

from prefect import flow

from rlcore.flows.parameters import Algorithm, Name, Overrides, Preset
from rlcore.flows.run import run_targets
from rlcore.tasks.store.artifacts import ArtifactRef
from rlcore.tasks.store.nested import flatten


@flow(name="online-rl", flow_run_name="{stage} {preset}", persist_result=False)
def online_rl(
    preset: Preset = "tiny",
    stage: Name = "grpo",
    algorithm: Algorithm = "",
    keys: dict[str, Any] | None = None,
    overrides: Overrides = (),
) -> dict[str, ArtifactRef]:
    """Run one stage of online RL and what it needs.

    Args:
        preset: A built-in preset such as tiny or smollm2, or the path of a .toml file on the worker's machine.
        stage: The stage of the preset to run.
        algorithm: The row of the table of algorithms; empty means the one of the stage.
        keys: Changed keys of the stage, as in its table of the preset.
        overrides: Changed keys of the preset, such as stages.grpo.learning_rate=1e-4 or seed=1.
    """
    own = {"algorithm": algorithm or None, **flatten(keys or {})}
    changed = [f"stages.{stage}.{key}={json.dumps(value)}" for key, value in own.items() if value is not None]
    return run_targets(preset, [*changed, *overrides], [stage])
