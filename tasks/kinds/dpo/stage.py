"""Stage kind ``dpo``."""

from __future__ import annotations

from functools import partial

from rlcore.tasks.kinds.dpo.settings import DpoStage
from rlcore.tasks.kinds.kind import (
    Lazy,
    Stage,
    StageKind,
    from_the_start,
    own_sections,
    stage_of_checkpoint,
    stages_of_data,
)
from rlcore.tasks.presets.graph import start_of
from rlcore.tasks.presets.run import RunConfig


def dpo_stage(name: str, config: RunConfig) -> Stage:
    """Return the stage that trains a checkpoint on preference pairs."""
    own = config.stage(name, DpoStage)
    start, data = stage_of_checkpoint(start_of(name, own)), stages_of_data(config, own.data)
    return Stage(
        name=name,
        version=1,
        kind="checkpoint",
        registered_as=name,
        render_page=Lazy("rlcore.tasks.kinds.dpo.page:dpo_page"),
        run=partial(Lazy("rlcore.tasks.kinds.dpo.step:run_dpo"), start=start),
        inputs=(start, *data),
        trains_on=data,
        sections=own_sections(name, "confidence", "hardware", "distributed", data=own.data),
        observers=("stage.eval_every", "confidence"),
        continuation=from_the_start("num_epochs"),
    )


KIND = StageKind(stage=dpo_stage, memory="rlcore.tasks.kinds.dpo.memory:need")
