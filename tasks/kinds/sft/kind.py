"""Stage kind ``sft``: supervised fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Literal

from rlcore.config.training import SftConfig
from rlcore.hardware.memory_plan import sft_footprint
from rlcore.strict_config import INLINE
from rlcore.tasks.kinds import Product, Rows
from rlcore.tasks.kinds.kind import Lazy, Stage, StageKind, from_the_start, own_sections, stage_of_start, stages_of_data
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.steps.memory_need import supervised_need


@dataclass(frozen=True, kw_only=True)
class SftStage:
    """Supervised fine-tuning."""

    produces: ClassVar[Product] = "checkpoint"
    consumes: ClassVar[Rows] = "demonstrations"
    data_key: ClassVar[str] = "data"
    is_compared: ClassVar[bool] = False
    kind: Literal["sft"]  # this kind of stage
    init_from: str  # `base`, or the stage whose checkpoint is trained
    data: tuple[str, ...]  # datasets of demonstrations, or stages that make them
    settings: SftConfig = field(metadata=INLINE)


def sft_stage(name: str, config: RunConfig) -> Stage:
    """Return the stage that trains a checkpoint on demonstrations."""
    own = config.stage(name, SftStage)
    start, data = stage_of_start(name, own), stages_of_data(config, own.data)
    return Stage(
        name=name,
        artifact="checkpoint",
        registered_as=name,
        render_page=partial(Lazy("rlcore.tasks.drawing.plots:draw_loss"), metric="sft/loss"),
        run=partial(Lazy("rlcore.tasks.kinds.sft.step:run_sft"), start=start, data=data),
        inputs=(start, *data),
        trains_on=data,
        sections=own_sections(name, "hardware", "distributed"),
        observers=("stage.eval_every",),
        continuation=from_the_start("num_steps"),
    )


KIND = StageKind(stage=sft_stage, memory=partial(supervised_need, footprint=sft_footprint))
