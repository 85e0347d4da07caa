"""Stage kind ``rl``."""

from __future__ import annotations

from functools import partial

from rlcore.config.rl import OBSERVERS
from rlcore.tasks.kinds.kind import (
    Continuation,
    Lazy,
    Stage,
    StageKind,
    own_sections,
    stage_of_checkpoint,
    stages_of_data,
)
from rlcore.tasks.kinds.rl.settings import RlStage
from rlcore.tasks.presets.graph import evaluated_data, num_earlier_rl, ref_policy_of, start_of
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.presets.stages import curriculum_of
from rlcore.tasks.steps.external import external_digest, needed_reward_models


def rl_stage(name: str, config: RunConfig, *, start: str = "") -> Stage:
    """Return the stage that trains a policy by online RL; ``start`` replaces the preset's starting stage."""
    own = config.stage(name, RlStage)
    start = start or stage_of_checkpoint(start_of(name, own))
    data, reference = stages_of_data(config, own.prompts), stage_of_checkpoint(ref_policy_of(name, own)) or start
    draw = curriculum_of(own)
    measured = (draw.pass_rates,) if draw else ()
    inputs = dict.fromkeys((start, reference, *data, *measured, *needed_reward_models(own.settings)))
    graded = dict.fromkeys((*stages_of_data(config, evaluated_data(config)), *config.evaluation.reward_models))
    observed = tuple(name for name in graded if name not in inputs)
    return Stage(
        name=name,
        version=1,
        kind="policy",
        registered_as=name,
        render_page=Lazy("rlcore.tasks.kinds.rl.page:rl_page"),
        run=partial(
            Lazy("rlcore.tasks.kinds.rl.step:run_online_rl"),
            stage=name,
            start=start,
            reference=reference,
            earlier=num_earlier_rl(config, name),
        ),
        inputs=(*inputs, *observed),
        sections=own_sections(name, "evaluation", "hardware", "health", "distributed"),
        observers=("evaluation", "health", *(f"stage.{key}" for key in OBSERVERS)),
        observed=observed,
        trains_on=data,
        continuation=Continuation(
            length="num_iterations",
            bound=_bound,
            stop=Lazy("rlcore.tasks.kinds.rl.continuation:stop_of"),
            recorded=Lazy("rlcore.tasks.kinds.rl.continuation:recorded"),
        ),
        source_digest=external_digest,
    )


def _bound(stage: RlStage) -> str:
    return stage.settings.bound_to_length


KIND = StageKind(
    stage=rl_stage, memory="rlcore.tasks.kinds.rl.memory:need", checks="rlcore.tasks.kinds.rl.checks:errors"
)
