"""Stage kind ``win_rate``."""

from __future__ import annotations

from functools import partial

from rlcore.tasks.kinds.kind import Lazy, Stage, StageKind, own_sections, stage_of_checkpoint, stages_of_data
from rlcore.tasks.kinds.win_rate.settings import WinRateStage
from rlcore.tasks.presets.graph import ref_policy_of, start_of
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.presets.stages import reward_models_of
from rlcore.tasks.steps.external import external_digest


def win_rate_stage(name: str, config: RunConfig) -> Stage:
    """Return the stage in which a judge compares a checkpoint's answers with another's."""
    own = config.stage(name, WinRateStage)
    policy, reference = (stage_of_checkpoint(each) for each in (start_of(name, own), ref_policy_of(name, own)))
    data = stages_of_data(config, dict.fromkeys((*own.data, *own.human_pairs)))
    return Stage(
        name=name,
        version=1,
        kind="win_rate",
        render_page=Lazy("rlcore.tasks.kinds.win_rate.page:win_rate_page"),
        run=partial(Lazy("rlcore.tasks.kinds.win_rate.step:run_win_rate"), policy=policy, reference=reference),
        inputs=tuple(dict.fromkeys((policy, reference, *data, *reward_models_of(own)))),
        sections=own_sections(name, "confidence", "hardware", data=own.human_pairs),
        source_digest=external_digest,
    )


KIND = StageKind(stage=win_rate_stage)
