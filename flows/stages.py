"""Stages of a run and their dependencies, from the graph of its preset. Flows name targets; the order follows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlcore.tasks.kinds.base.kind import IMPORTED, start_stage
from rlcore.tasks.kinds.compare.kind import compare_stage
from rlcore.tasks.kinds.data.kind import data_stage
from rlcore.tasks.kinds.drift.kind import drift_stage
from rlcore.tasks.kinds.evaluate.kind import evaluate_stage
from rlcore.tasks.kinds.kind import Stage, preset_stage, stages_of_data
from rlcore.tasks.kinds.reward_gate.kind import reward_gate_stage
from rlcore.tasks.kinds.rl.kind import RlStage, rl_stage
from rlcore.tasks.presets.graph import checkpoints, data_of, registered_starts, stage_order
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.presets.settings import PromotionConfig
from rlcore.tasks.promotion.kind import promote_stages
from rlcore.tasks.steps.base import prepare_stage_name
from rlcore.tasks.steps.external import needed_reward_models

if TYPE_CHECKING:
    from rlcore.tasks.tracking.lineage import ChampionLineage
    from rlcore.tasks.tracking.registry import ModelVersion


def stages(config: RunConfig) -> tuple[Stage, ...]:
    """Return all stages of a run: imports, data, the preset's own, an evaluation per checkpoint, the comparison."""
    return (
        *_imports_and_data(config),
        *(preset_stage(name, config) for name in stage_order(config)),
        *(evaluate_stage(name, config) for name in checkpoints(config)),
        compare_stage(config),
    )


def datasets(config: RunConfig) -> tuple[str, ...]:
    """Return the stages that prepare the datasets."""
    return tuple(prepare_stage_name(name) for name in config.data)


def retrain_stages(config: RunConfig, champion: ModelVersion, past: ChampionLineage) -> tuple[Stage, ...]:
    """Return the stages of a retraining: gates for drift and reward model, RL from the champion, promotion."""
    challenger = config.section("promotion", PromotionConfig).challenger
    own = config.stage(challenger, RlStage)
    models = needed_reward_models(own.settings)
    rows = dict.fromkeys((*own.prompts, *(name for model in models for name in data_of(config.stages[model]))))
    return (
        *_imports_and_data(config),
        drift_stage(stages_of_data(config, rows), past),  # a failed gate ends the retraining before any training
        *(preset_stage(name, config) for name in stage_order(config) if name != challenger),
        *(reward_gate_stage(name, config, past) for name in models),
        rl_stage(challenger, config, start="champion"),
        evaluate_stage(challenger, config),
        *promote_stages(config, champion),
    )


def _imports_and_data(config: RunConfig) -> tuple[Stage, ...]:
    starts = (start_stage(name, model) for name, model in registered_starts(config).items())
    return (IMPORTED, *starts, *(data_stage(name, config) for name in config.data))
