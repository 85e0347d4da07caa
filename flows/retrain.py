"""Flow: retrain the champion on new data."""

from __future__ import annotations

from prefect import flow

from rlcore.flows.parameters import Overrides, Preset
from rlcore.flows.run import run_retrain
from rlcore.tasks.pipeline.retrain import Retraining


@flow(name="retrain", flow_run_name="retrain {preset}", persist_result=False)
def retrain(preset: Preset = "retrain", overrides: Overrides = ()) -> Retraining:
    """Gate new data and their drift, then the reward model; RL from the champion; promote or reject. Idempotent.

    Args:
        preset: A built-in preset such as retrain, or the path of a .toml file on the worker's machine.
        overrides: Changed keys of the preset, such as stages.grpo.learning_rate=1e-4 or seed=1.
    """
    return run_retrain(preset, overrides)
