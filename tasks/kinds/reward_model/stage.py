"""Stage kind ``reward_model``."""

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
from rlcore.tasks.kinds.reward_model.settings import RewardModelStage
from rlcore.tasks.presets.graph import start_of
from rlcore.tasks.presets.run import RunConfig


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


KIND = StageKind(stage=reward_model_stage, memory="rlcore.tasks.kinds.reward_model.memory:need")
