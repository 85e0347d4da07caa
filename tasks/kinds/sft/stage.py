"""Stage kind ``sft``."""

from __future__ import annotations

from functools import partial

from rlcore.tasks.kinds.kind import (
    Lazy,
    Stage,
    StageKind,
    from_the_start,
    own_sections,
    stage_of_checkpoint,
    stages_of_data,
)
from rlcore.tasks.kinds.sft.settings import SftStage
from rlcore.tasks.presets.graph import start_of
from rlcore.tasks.presets.run import RunConfig


def sft_stage(name: str, config: RunConfig) -> Stage:
    """Return the stage that trains a checkpoint on demonstrations."""
    own = config.stage(name, SftStage)
    start, data = stage_of_checkpoint(start_of(name, own)), stages_of_data(config, own.data)
    return Stage(
        name=name,
        version=1,
        kind="checkpoint",
        registered_as=name,
        render_page=Lazy("rlcore.tasks.kinds.sft.page:sft_page"),
        run=partial(Lazy("rlcore.tasks.kinds.sft.step:run_sft"), start=start, data=data),
        inputs=(start, *data),
        trains_on=data,
        sections=own_sections(name, "hardware", "distributed"),
        observers=("stage.eval_every",),
        continuation=from_the_start("num_steps"),
    )


KIND = StageKind(stage=sft_stage, memory="rlcore.tasks.kinds.sft.memory:need")
