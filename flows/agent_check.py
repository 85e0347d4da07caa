"""Check of a preset's agent before a run."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlcore.errors import ConfigError
from rlcore.flows.presets import open_preset
from rlcore.flows.run import run_targets
from rlcore.flows.stages import stages
from rlcore.strict_config import config_error
from rlcore.tasks.keys.plan import recorded_refs
from rlcore.tasks.kinds.kind import stage_of_start
from rlcore.tasks.kinds.rl.kind import RlStage
from rlcore.tasks.presets.graph import reward_models_of
from rlcore.tasks.steps.base import prepare_stage_name
from rlcore.tasks.steps.external import agent_errors
from rlcore.tasks.store.artifacts import ArtifactStore
from rlcore.tasks.store.settings import Home

if TYPE_CHECKING:
    from rlcore.tasks.preflight.agent_check import AgentCheck

logger = logging.getLogger("rlcore.agent_check")


def run_agent_check(home: Home, preset: str, overrides: Sequence[str], *, stage: str, count: int) -> AgentCheck:
    """Play ``count`` episodes of a stage's agent; import the model and prepare the prompts if that was not done.

    Raises:
        ConfigError: the preset or its agent is wrong, or the stage starts from one that has no result yet.
    """
    from rlcore.tasks.preflight.agent_check import agent_stage, check_agent  # brings torch

    config = open_preset(preset, overrides)
    name = agent_stage(config, stage)
    own = config.stage(name, RlStage)
    agent = own.settings.sampling.agent
    assert agent is not None
    if errors := list(agent_errors(agent, f"stages.{name}.sampling.agent")):
        raise config_error(errors, preset)
    start = stage_of_start(name, own)
    needed = [start, *map(prepare_stage_name, own.prompts), *reward_models_of(own)]
    table = stages(config)
    missing = [each for each in needed if each not in recorded_refs(table, config, needed, home=home)]
    if trained := [each for each in missing if each in config.stages]:
        raise ConfigError(
            f"stages.{name} needs {trained[0]}, which has no result yet",
            where=preset,
            fix=f"rlcore run {preset} first, or check with the base: --set stages.{name}.init_from=base",
        )
    if missing:
        run_targets(preset, overrides, missing)
    store = ArtifactStore(home.root)
    refs = recorded_refs(table, config, needed, home=home)
    inputs = {each: store.path(refs[each]) for each in needed}
    return check_agent(config, name, inputs, start=start, count=count, log=logger.info)
