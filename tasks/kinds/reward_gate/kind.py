"""Gate for the reward model of a retraining."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from rlcore.tasks.kinds.kind import Lazy, Stage, own_sections, stages_of_data
from rlcore.tasks.presets.graph import data_of
from rlcore.tasks.presets.run import RunConfig

if TYPE_CHECKING:
    from rlcore.tasks.tracking.lineage import ChampionLineage


def reward_gate_stage(model: str, config: RunConfig, past: ChampionLineage) -> Stage:
    """Return the gate that compares a new reward model with the one that trained the champion."""
    names = data_of(config.stages[model])
    data = stages_of_data(config, names)
    return Stage(
        name="reward_gate",
        version=1,
        kind="verdict",
        render_page=Lazy("rlcore.tasks.kinds.reward_gate.page:reward_gate_page"),
        run=partial(
            Lazy("rlcore.tasks.kinds.reward_gate.step:run_reward_gate"),
            model=model,
            registered=f"{config.name}-{model}",
            previous=past.artifacts.get(model, ""),
            seen=past.paired,
        ),
        inputs=(model, *data),
        sections=own_sections(model, "retrain", "hardware", data=names),
    )
