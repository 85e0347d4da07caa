"""Stage kind ``dpo``: direct preference optimization."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Literal

from rlcore.config.training import DpoConfig
from rlcore.hardware.memory_plan import dpo_footprint
from rlcore.strict_config import INLINE
from rlcore.tasks.kinds import Product, Rows
from rlcore.tasks.kinds.kind import Lazy, Stage, StageKind, from_the_start, own_sections, stage_of_start, stages_of_data
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.steps.memory_need import supervised_need


@dataclass(frozen=True, kw_only=True)
class DpoStage:
    """Direct preference optimization."""

    produces: ClassVar[Product] = "checkpoint"
    consumes: ClassVar[Rows] = "preference pairs"
    data_key: ClassVar[str] = "data"
    is_compared: ClassVar[bool] = False
    kind: Literal["dpo"]  # this kind of stage
    init_from: str  # `base`, or the stage whose checkpoint is trained
    data: tuple[str, ...]  # datasets of preference pairs
    settings: DpoConfig = field(metadata=INLINE)


def dpo_stage(name: str, config: RunConfig) -> Stage:
    """Return the stage that trains a checkpoint on preference pairs."""
    own = config.stage(name, DpoStage)
    start, data = stage_of_start(name, own), stages_of_data(config, own.data)
    return Stage(
        name=name,
        artifact="checkpoint",
        registered_as=name,
        render_page=partial(Lazy("rlcore.tasks.drawing.plots:draw_loss"), metric="dpo/loss"),
        run=partial(Lazy("rlcore.tasks.kinds.dpo.step:run_dpo"), start=start),
        inputs=(start, *data),
        trains_on=data,
        sections=own_sections(name, "confidence", "hardware", "distributed", data=own.data),
        observers=("stage.eval_every", "confidence"),
        continuation=from_the_start("num_epochs"),
    )


KIND = StageKind(stage=dpo_stage, memory=partial(supervised_need, footprint=dpo_footprint, adapter="lora.rank"))
