"""Stages of a promotion: the champion, the comparisons, and the decision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from rlcore.tasks.kinds.benchmark.kind import benchmark_stage
from rlcore.tasks.kinds.evaluate.kind import evaluate_stage
from rlcore.tasks.kinds.kind import Lazy, Stage, sections, stages_of_data
from rlcore.tasks.kinds.win_rate.kind import WinRateStage, win_rate_stage
from rlcore.tasks.presets.graph import evaluated_data
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.presets.sections import Sections
from rlcore.tasks.presets.settings import PromotionConfig

if TYPE_CHECKING:
    from rlcore.tasks.tracking.registry import ModelVersion


CHAMPION_STAGE = "champion"
WINS = "champion_win_rate"
"""The stage of the challenger's win rate over the champion, where that decides."""
CHALLENGER_ASKED, CHAMPION_ASKED = "asked_challenger_", "asked_champion_"
"""Prefixes of the stages of both sides' benchmarks."""


def model_name(preset: str, settings: PromotionConfig) -> str:
    """Return the registered model that the challenger is a version of."""
    return f"{preset}-{settings.challenger}"


def promote_stages(config: RunConfig, champion: ModelVersion | None) -> tuple[Stage, ...]:
    """Return the stages of the champion, its comparisons, and the decision."""
    promotion = config.section("promotion", PromotionConfig)
    challenger, data = promotion.challenger, evaluated_data(config)
    judged = config.stage(promotion.win_rate, WinRateStage).data if promotion.win_rate else ()
    asked = dict.fromkeys((*data, *judged))
    inputs: tuple[str, ...] = (challenger, f"evaluate_{challenger}", *stages_of_data(config, asked))
    opponent: tuple[Stage, ...] = ()
    if champion is not None:
        uri = f"models:/{champion.name}/{champion.version}"
        imported = Stage(
            name=CHAMPION_STAGE,
            version=1,
            kind="checkpoint",
            run=partial(Lazy("rlcore.tasks.promotion.step:run_champion"), uri=uri, sha256=champion.sha256),
            sections=sections(),
            source_digest=partial(_constant, champion.model_id),
        )
        sides = {"policy": challenger, "baseline": CHAMPION_STAGE}
        wins = (_held(config, promotion.win_rate, win_rate_stage, WINS, **sides),) if promotion.win_rate else ()
        asked_both = tuple(
            _held(config, name, benchmark_stage, f"{prefix}{name}", policy=side)
            for prefix, side in ((CHALLENGER_ASKED, challenger), (CHAMPION_ASKED, CHAMPION_STAGE))
            for name in promotion.benchmarks
        )
        opponent = (imported, evaluate_stage(CHAMPION_STAGE, config), *wins, *asked_both)
        inputs = (*inputs, *(stage.name for stage in opponent))
    version, sha256 = (str(champion.version), champion.sha256) if champion else ("", "")
    decision = Stage(
        name="promote",
        version=1,
        kind="verdict",
        render_page=Lazy("rlcore.tasks.promotion.page:promotion_page"),
        run=partial(
            Lazy("rlcore.tasks.promotion.step:run_promote"),
            challenger=challenger,
            champion=version,
            champion_sha256=sha256,
            data=data,
            judged=judged,
        ),
        inputs=inputs,
        sections=sections("name", "promotion"),
    )
    return (*opponent, decision)


def _held(config: RunConfig, name: str, build: Callable[[str, RunConfig], Stage], called: str, **sides: str) -> Stage:
    """Return a stage of the preset between other sides, under another name."""
    compared: Any = replace(config.stages[name], **sides)
    between = replace(config, stages={**config.stages, name: compared})
    stage = build(name, between)
    return replace(stage, name=called, sections=partial(_as_in, between, stage.sections))


def _as_in(changed: RunConfig, sections: Callable[[RunConfig], Sections], config: RunConfig) -> Sections:
    return sections(changed)


def _constant(value: str, config: Sections) -> str:
    return value
