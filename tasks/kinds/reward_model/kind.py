"""Stage kind ``reward_model``: training of reward models."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Literal

from rlcore.config.training import RewardModelConfig
from rlcore.hardware.memory_plan import reward_model_footprint
from rlcore.strict_config import INLINE
from rlcore.tasks.kinds import Product, Rows
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
from rlcore.tasks.steps.memory_need import supervised_need


@dataclass(frozen=True, kw_only=True)
class RewardModelStage:
    """Reward-model training."""

    produces: ClassVar[Product] = "reward_model"
    consumes: ClassVar[Rows] = "preference pairs"
    data_key: ClassVar[str] = "data"
    is_compared: ClassVar[bool] = True
    kind: Literal["reward_model"]  # this kind of stage
    init_from: str  # `base`, or the stage whose checkpoint is the backbone
    data: tuple[str, ...]  # datasets of preference pairs
    # datasets of pairs with known labels, which are not trained on and must be ranked correctly
    gold_pairs: tuple[str, ...] = ()
    # train on the pairs of one half of the prompts; a judge of a policy needs the half that its reward model does not
    # use
    half: Literal["all", "first", "second"] = "all"
    settings: RewardModelConfig = field(metadata=INLINE)


def reward_model_stage(name: str, config: RunConfig) -> Stage:
    """Return the stage that trains a reward model on preference pairs."""
    own = config.stage(name, RewardModelStage)
    start, pairs = stage_of_checkpoint(start_of(name, own)), (*own.data, *own.gold_pairs)
    return Stage(
        name=name,
        version=1,
        kind="reward_model",
        registered_as=name,
        render_page=Lazy("rlcore.tasks.kinds.reward_model.page:reward_page"),
        run=partial(Lazy("rlcore.tasks.kinds.reward_model.step:run_reward_model"), start=start),
        inputs=(start, *stages_of_data(config, pairs)),
        trains_on=tuple(set(stages_of_data(config, own.data)) - set(stages_of_data(config, own.gold_pairs))),
        sections=own_sections(name, "confidence", "hardware", "distributed", data=pairs),
        observers=("stage.eval_every", "confidence"),
        continuation=from_the_start("num_epochs"),
    )


KIND = StageKind(
    stage=reward_model_stage,
    memory=partial(supervised_need, footprint=reward_model_footprint, adapter="backbone.lora.rank"),
)
