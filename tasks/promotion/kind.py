"""Stages of a promotion: the champion, the comparisons, and the decision."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rlcore.strict_config import build
from rlcore.tasks.drawing.levels import check_table
from rlcore.tasks.drawing.result import Result
from rlcore.tasks.kinds.benchmark.kind import BenchmarkStage
from rlcore.tasks.kinds.evaluate.kind import evaluate_stage
from rlcore.tasks.kinds.kind import Lazy, Stage, preset_stage, sections, stages_of_data
from rlcore.tasks.kinds.win_rate.kind import WinRateStage, headline
from rlcore.tasks.presets.graph import evaluated_data
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.presets.sections import Sections
from rlcore.tasks.presets.settings import PromotionConfig
from rlcore.tasks.store.markdown import excerpt, plain
from rlcore.tasks.store.storage import read_json

if TYPE_CHECKING:
    import pandas as pd

    from rlcore.evaluation.promotion import PromotionDecision
    from rlcore.tasks.tracking.registry import ModelVersion

_SHOWN = 5  # samples on the page

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
    asks = tuple(_benchmark(name, challenger, CHALLENGER_ASKED, config) for name in promotion.benchmarks if champion)
    inputs: tuple[str, ...] = (challenger, f"evaluate_{challenger}", *stages_of_data(config, asked))
    opponent: tuple[Stage, ...] = ()
    if champion is not None:
        uri = f"models:/{champion.name}/{champion.version}"
        imported = Stage(
            name=CHAMPION_STAGE,
            artifact="checkpoint",
            run=partial(Lazy("rlcore.tasks.promotion.step:run_champion"), uri=uri, sha256=champion.sha256),
            sections=sections(),
            source_digest=lambda config: champion.model_id,
        )
        wins: tuple[Stage, ...] = ()
        if promotion.win_rate:
            own = replace(config.stage(promotion.win_rate, WinRateStage), policy=challenger, baseline=CHAMPION_STAGE)
            wins = (_renamed(WINS, promotion.win_rate, own, config),)
        theirs = (_benchmark(name, CHAMPION_STAGE, CHAMPION_ASKED, config) for name in promotion.benchmarks)
        opponent = (imported, evaluate_stage(CHAMPION_STAGE, config), *wins, *asks, *theirs)
        inputs = (*inputs, *(stage.name for stage in opponent))
    version, sha256 = (str(champion.version), champion.sha256) if champion else ("", "")
    decision = Stage(
        name="promote",
        artifact="verdict",
        render_page=promotion_page,
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


def _benchmark(name: str, checkpoint: str, beginning: str, config: RunConfig) -> Stage:
    asked = replace(config.stage(name, BenchmarkStage), policy=checkpoint)
    return _renamed(f"{beginning}{name}", name, asked, config)


def _renamed(new: str, name: str, table: WinRateStage | BenchmarkStage, config: RunConfig) -> Stage:
    """Return the stage ``name`` with another table, under a new name."""
    between = replace(config, stages={**config.stages, name: table})
    stage = preset_stage(name, between)
    return replace(stage, name=new, sections=partial(_as_in, between, stage.sections))


def _as_in(changed: RunConfig, sections: Callable[[RunConfig], Sections], config: RunConfig) -> Sections:
    return sections(changed)


def promotion_page(result: Result, folder: Path) -> str:
    """Write ``verdict.md``: all checks with intervals, and the answers that changed."""
    from rlcore.evaluation.promotion import PromotionDecision
    from rlcore.tasks.kinds.compare.step import greedy_answers  # brings pandas
    from rlcore.tasks.promotion.step import evaluations

    document = read_json(result.data / "verdict.json")
    folders = evaluations(result.inputs, document["challenger"])
    answers = {side: greedy_answers(each) for side, each in folders.items()}
    decision, wins = build(PromotionDecision, document["verdict"]), document["win_rate"]
    page = render(
        document["model"], decision, answers, champion=document["champion"], wins=headline(wins) if wins else ""
    )
    (folder / "verdict.md").write_text(page, encoding="utf-8")
    return page


def render(
    name: str, decision: PromotionDecision, answers: Mapping[str, pd.DataFrame], *, champion: str, wins: str = ""
) -> str:
    """Render the page as Markdown. ``answers``: greedy ones of the challenger, and of the champion if there is one.

    ``wins``: a line about the win rate that decided.
    """
    against = f"against version {plain(champion)}" if champion else "the first champion"
    parts = [f"# {plain(name)}: {against}", f"**{plain(decision.sentence)}**"]
    if decision.checks:
        parts += [f"Look {decision.look} at these held-out prompts, level {decision.alpha:.3g}.", check_table(decision)]
    if wins:
        parts.append(f"{plain(wins)}. Its prompts and results: the page of the stage {WINS}.")
    if "champion" in answers and len(answers["champion"]):
        both = answers["champion"].merge(answers["challenger"], on="prompt_id", suffixes=("_champion", "_challenger"))
        won = both[~both["correct_champion"] & both["correct_challenger"]]
        lost = both[both["correct_champion"] & ~both["correct_challenger"]]
        parts += [f"## Problems won: {len(won)}", _samples(won), f"## Problems lost: {len(lost)}", _samples(lost)]
    return "\n\n".join(parts) + "\n"


def _samples(changed: pd.DataFrame) -> str:
    if not len(changed):
        return "None."
    lines = ["| problem | champion | challenger |", "|---|---|---|"]
    lines += [
        f"| {excerpt(row.prompt_id)} | {excerpt(row.completion_champion)} | {excerpt(row.completion_challenger)} |"
        for row in changed.head(_SHOWN).itertuples()
    ]
    return "\n".join(lines)
