"""Stage kind ``rejection``: demonstrations by rejection sampling."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Literal

from rlcore.config.answers import RejectionConfig
from rlcore.strict_config import INLINE
from rlcore.tasks.kinds import Product, Rows
from rlcore.tasks.kinds.kind import Lazy, Stage, StageKind, own_sections, stage_of_checkpoint, stages_of_data
from rlcore.tasks.presets.graph import prompt_data, reward_models_of, start_of
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.steps.external import external_digest


@dataclass(frozen=True, kw_only=True)
class RejectionStage:
    """Rejection sampling: demonstrations from the good completions of a policy."""

    produces: ClassVar[Product] = "demonstrations"
    consumes: ClassVar[Rows] = "prompts"
    data_key: ClassVar[str] = "data"
    is_compared: ClassVar[bool] = True
    kind: Literal["rejection"]  # this kind of stage
    policy: str  # checkpoint that samples
    data: tuple[str, ...]  # datasets of prompts
    settings: RejectionConfig = field(metadata=INLINE)


def rejection_stage(name: str, config: RunConfig) -> Stage:
    """Return the stage that samples a policy and keeps highly rewarded answers as demonstrations."""
    own = config.stage(name, RejectionStage)
    policy, held_out = stage_of_checkpoint(start_of(name, own)), stages_of_data(config, prompt_data(config))
    data = dict.fromkeys((*stages_of_data(config, own.data), *held_out))
    return Stage(
        name=name,
        version=1,
        kind="dataset",
        render_page=Lazy("rlcore.tasks.kinds.rejection.page:rejection_page"),
        run=partial(Lazy("rlcore.tasks.kinds.rejection.step:run_rejection"), policy=policy, held_out=held_out),
        inputs=(policy, *data, *reward_models_of(own)),
        sections=own_sections(name, "confidence", "hardware", data=own.data),
        source_digest=external_digest,
        observers=("confidence",),
    )


KIND = StageKind(stage=rejection_stage)
