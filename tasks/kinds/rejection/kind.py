"""Stage kind ``rejection``: demonstrations by rejection sampling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

from rlcore.config.answers import RejectionConfig
from rlcore.strict_config import INLINE
from rlcore.tasks.drawing.levels import format_level
from rlcore.tasks.drawing.result import Result
from rlcore.tasks.kinds import Product, Rows
from rlcore.tasks.kinds.kind import Lazy, Stage, StageKind, own_sections, stage_of_start, stages_of_data
from rlcore.tasks.presets.graph import prompt_data, reward_models_of
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.steps.external import external_digest
from rlcore.tasks.store.markdown import plain
from rlcore.tasks.store.storage import read_json


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
    policy, held_out = stage_of_start(name, own), stages_of_data(config, prompt_data(config))
    data = dict.fromkeys((*stages_of_data(config, own.data), *held_out))
    return Stage(
        name=name,
        artifact="dataset",
        render_page=rejection_page,
        run=partial(Lazy("rlcore.tasks.kinds.rejection.step:run_rejection"), policy=policy, held_out=held_out),
        inputs=(policy, *data, *reward_models_of(own)),
        sections=own_sections(name, "confidence", "hardware", data=own.data),
        source_digest=external_digest,
        observers=("confidence",),
    )


def rejection_page(result: Result, folder: Path) -> str:
    """Write ``rejection.md``."""
    summary = read_json(result.data / "rejection.json")
    yields = {"all": summary["all"], **summary["tasks"]}
    page = render(yields, summary["dropped"], confidence=result.confidence)
    (folder / "rejection.md").write_text(f"{page}\n", encoding="utf-8")
    return page


def render(yields: Mapping[str, Mapping[str, Any]], dropped: Mapping[str, int], *, confidence: float) -> str:
    """Render the summary as Markdown. ``yields``: JSON of :class:`rlcore.sampling.rejection.RejectionStats` by task."""
    lines = [
        "| task | prompts | sampled | verified | kept | accepted | pass rate "
        f"| {format_level(confidence)} interval | prompts solved |",
        "|---" * 9 + "|",
    ]
    lines += [
        f"| {plain(task)} | {each['num_prompts']} | {each['sampled']} | {each['verified']} | {each['kept']} "
        f"| {each['kept'] / each['sampled']:.3f} | {each['pass_rate']['mean']:.3f} "
        f"| [{each['pass_rate']['low']:.3f}, {each['pass_rate']['high']:.3f}] | {each['solved']['mean']:.3f} |"
        for task, each in yields.items()
    ]
    went = ", ".join(f"{count} {reason}" for reason, count in dropped.items() if count)
    return "\n".join([*lines, "", f"Not kept: {went or 'none'}."])


KIND = StageKind(stage=rejection_stage)
