"""Evaluation of a checkpoint on the held-out problems."""

from __future__ import annotations

from functools import partial

from rlcore.tasks.kinds.kind import Lazy, Stage, stage_of_checkpoint, stages_of_data
from rlcore.tasks.presets.graph import evaluated_data
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.steps.external import evaluation_sections, external_digest


def evaluate_stage(checkpoint: str, config: RunConfig) -> Stage:
    """Return the stage that evaluates a checkpoint, named as in presets."""
    stage = stage_of_checkpoint(checkpoint)
    return Stage(
        name=f"evaluate_{checkpoint}",
        artifact="evaluation",
        run=partial(Lazy("rlcore.tasks.kinds.evaluate.step:run_evaluate"), checkpoint=stage),
        inputs=(stage, *stages_of_data(config, evaluated_data(config)), *config.evaluation.reward_models),
        sections=evaluation_sections,
        source_digest=external_digest,
    )
