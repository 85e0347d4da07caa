"""Stage kind ``rejection``."""

from __future__ import annotations

from functools import partial

from rlcore.tasks.kinds.kind import Lazy, Stage, StageKind, own_sections, stage_of_checkpoint, stages_of_data
from rlcore.tasks.kinds.rejection.settings import RejectionStage
from rlcore.tasks.presets.graph import prompt_data, start_of
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.presets.stages import reward_models_of
from rlcore.tasks.steps.external import external_digest


def rejection_stage(name: str, config: RunConfig) -> Stage:
    """Return the stage that samples a policy and keeps highly rewarded answers as demonstrations."""
    own = config.stage(name, RejectionStage)
    policy, held_out = stage_of_checkpoint(start_of(name, own)), stages_of_data(config, prompt_data(config))
    data = dict.fromkeys((*stages_of_data(config, own.data), *held_out))
    return Stage(
        name=name,
        version=1,
        kind="dataset",
        render_page=Lazy("rlcore.tasks.kinds.rejection.page:rejection_page"),
        run=partial(Lazy("rlcore.tasks.kinds.rejection.step:run_rejection"), policy=policy, held_out=held_out),
        inputs=(policy, *data, *reward_models_of(own)),
        sections=own_sections(name, "confidence", "hardware", data=own.data),
        source_digest=external_digest,
        observers=("confidence",),
    )


KIND = StageKind(stage=rejection_stage)
