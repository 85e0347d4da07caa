"""Stage kind ``difficulty``: pass rates of prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

from rlcore.config.answers import AnswersConfig
from rlcore.strict_config import INLINE
from rlcore.tasks.drawing.levels import format_level
from rlcore.tasks.drawing.result import Result
from rlcore.tasks.kinds import Product, Rows
from rlcore.tasks.kinds.kind import Lazy, Stage, StageKind, own_sections, stage_of_start, stages_of_data
from rlcore.tasks.presets.graph import reward_models_of
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.steps.external import external_digest
from rlcore.tasks.store.markdown import plain
from rlcore.tasks.store.storage import read_json


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
    policy = stage_of_start(name, own)
    return Stage(
        name=name,
        artifact="difficulty",
        render_page=difficulty_page,
        run=partial(Lazy("rlcore.tasks.kinds.difficulty.step:run_difficulty"), policy=policy),
        inputs=(policy, *stages_of_data(config, own.data), *reward_models_of(own)),
        trains_on=stages_of_data(config, own.data),
        sections=own_sections(name, "confidence", "hardware"),
        source_digest=external_digest,
        observers=("confidence",),
    )


def difficulty_page(result: Result, folder: Path) -> str:
    """Write ``difficulty.md`` and ``histogram.png``."""
    from rlcore.tasks.drawing import plots  # brings matplotlib

    summary = read_json(result.data / "difficulty.json")
    page = render(summary, confidence=result.confidence)
    (folder / "difficulty.md").write_text(page, encoding="utf-8")
    title = f"pass rates of {summary['policy']}, {summary['num_samples']} answers a prompt"
    plots.histogram(summary["histogram"], folder / "histogram.png", title=title, label="pass rate")
    return page


def render(summary: Mapping[str, Any], *, confidence: float) -> str:
    """Render the page as Markdown."""
    rate, prompts = summary["pass_rate"], summary["prompts"]
    lines = [
        f"{plain(summary['policy'])} passes {rate['mean']:.3f} of its answers, {format_level(confidence)} interval "
        f"[{rate['low']:.3f}, {rate['high']:.3f}], on {prompts} prompts with {summary['answers']} scored answers.",
        "",
        f"Never solved: {summary['never']} prompts; always: {summary['always']}; without a scored answer: "
        f"{summary['unscored']}.",
        "",
        "| task | prompts | mean pass rate |",
        "|---|---|---|",
        *(f"| {plain(task)} | {count} | {mean:.3f} |" for task, (count, mean) in summary["tasks"].items()),
        "",
        "| pass rate | prompts | fraction |",
        "|---|---|---|",
        *(f"| {value:.3f} | {count} | {count / prompts:.3f} |" for value, count in summary["histogram"]),
    ]
    return "\n".join(lines) + "\n"


KIND = StageKind(stage=difficulty_stage)
