"""Flow: multi-stage reasoning (DeepSeek-R1).

    cold-start SFT -> GRPO, verifiable rewards -> rejection sampling -> SFT on what was kept -> GRPO, mixed rewards

with an evaluation after every stage and a comparison at the end.
"""

from __future__ import annotations

from prefect import flow

from flows.parameters import Overrides, Preset
from flows.run import run_targets, targets_of_reasoning
from tasks.home.artifacts import ArtifactRef


@flow(name="reasoning", flow_run_name="reasoning {preset}", persist_result=False)
def reasoning(preset: Preset = "reasoning", overrides: Overrides = ()) -> dict[str, ArtifactRef]:
    """Each stage once, in order, cached by content; the preset needs the sections of the second half.

    Args:
        preset: A committed preset such as tiny or smollm2, or the path of a .toml file on the worker's machine.
        overrides: Single keys of the preset with other values, such as grpo.learning_rate=1e-4 or seed=1.
    """
    return run_targets(preset, overrides, targets_of_reasoning(preset, overrides))
