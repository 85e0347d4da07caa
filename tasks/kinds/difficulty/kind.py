"""Stage kind ``difficulty``: pass rates of prompts."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Literal

from rlcore.config.answers import AnswersConfig
from rlcore.strict_config import INLINE
from rlcore.tasks.kinds import Product, Rows
from rlcore.tasks.kinds.kind import Lazy, Stage, StageKind, own_sections, stage_of_checkpoint, stages_of_data
from rlcore.tasks.presets.graph import reward_models_of, start_of
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.steps.external import external_digest


@dataclass(frozen=True, kw_only=True)
class DifficultyStage:
    """Pass rate of a policy on each training prompt, for the curriculum of RL stages."""

    produces: ClassVar[Product] = "measurements"
    consumes: ClassVar[Rows] = "prompts"
    data_key: ClassVar[str] = "data"
    is_compared: ClassVar[bool] = False
    kind: Literal["difficulty"]  # this kind of stage
    policy: str  # checkpoint whose pass rates are measured
    data: tuple[str, ...]  # datasets of prompts
    settings: AnswersConfig = field(metadata=INLINE)


def difficulty_stage(name: str, config: RunConfig) -> Stage:
    """Return the stage that measures a policy's pass rate on each prompt."""
    own = config.stage(name, DifficultyStage)
    policy = stage_of_checkpoint(start_of(name, own))
    return Stage(
        name=name,
        version=1,
        kind="difficulty",
        render_page=Lazy("rlcore.tasks.kinds.difficulty.page:difficulty_page"),
        run=partial(Lazy("rlcore.tasks.kinds.difficulty.step:run_difficulty"), policy=policy),
        inputs=(policy, *stages_of_data(config, own.data), *reward_models_of(own)),
        trains_on=stages_of_data(config, own.data),
        sections=own_sections(name, "confidence", "hardware"),
        source_digest=external_digest,
        observers=("confidence",),
    )


KIND = StageKind(stage=difficulty_stage)
