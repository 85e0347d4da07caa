"""Gate for the reward model of a retraining."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rlcore.strict_config import build
from rlcore.tasks.drawing.levels import check_table
from rlcore.tasks.drawing.result import Result
from rlcore.tasks.kinds.kind import Lazy, Stage, own_sections, stages_of_data
from rlcore.tasks.presets.graph import data_of
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.store.markdown import excerpt, plain
from rlcore.tasks.store.storage import read_json, read_table

if TYPE_CHECKING:
    import pandas as pd

    from rlcore.evaluation.promotion import PromotionDecision
    from rlcore.tasks.tracking.lineage import ChampionLineage

_SHOWN = 5  # pairs on the page


def reward_gate_stage(model: str, config: RunConfig, past: ChampionLineage) -> Stage:
    """Return the gate that compares a new reward model with the one that trained the champion."""
    names = data_of(config.stages[model])
    data = stages_of_data(config, names)
    return Stage(
        name="reward_gate",
        artifact="verdict",
        render_page=reward_gate_page,
        run=partial(
            Lazy("rlcore.tasks.kinds.reward_gate.step:run_reward_gate"),
            model=model,
            registered=f"{config.name}-{model}",
            previous=past.artifacts.get(model, ""),
            seen=past.paired,
        ),
        inputs=(model, *data),
        sections=own_sections(model, "retrain", "hardware", data=names),
    )


def reward_gate_page(result: Result, folder: Path) -> str:
    """Write ``reward_gate.md``: all checks with intervals, and pairs on which the two models disagree."""
    from rlcore.evaluation.promotion import PromotionDecision

    document = read_json(result.data / "reward_gate.json")
    margins = read_table(result.data / "margins.parquet")
    page = render(build(PromotionDecision, document["verdict"]), margins, is_same=document["is_same"])
    (folder / "reward_gate.md").write_text(page, encoding="utf-8")
    return page


def render(decision: PromotionDecision, margins: pd.DataFrame, *, is_same: bool) -> str:
    """Render the page as Markdown. ``margins``: a row per pair, with the previous model's margin if there is one."""
    parts = ["# The reward model", f"**{plain(decision.sentence)}**", check_table(decision)]
    if is_same:
        parts.append("It is the champion's reward model: neither data nor settings have changed.")
    elif "previous" not in margins:
        parts.append("The champion was made with no reward model of this name, so there is nothing to compare with.")
    else:
        parts += ["## Pairs on which the two disagree", _disagreements(margins)]
    return "\n\n".join(parts) + "\n"


def _disagreements(margins: pd.DataFrame) -> str:
    import numpy as np

    apart = margins[np.sign(margins["new"]) != np.sign(margins["previous"])]
    if not len(apart):
        return "None."
    gaps = (apart["new"] - apart["previous"]).abs()
    worst = apart.loc[gaps.sort_values(ascending=False, kind="stable").index[:_SHOWN]]
    lines = ["| pair | chosen | rejected | margin, new | previous |", "|---|---|---|---|---|"]
    lines += [
        f"| {excerpt(row.pair_id)} | {excerpt(row.chosen)} | {excerpt(row.rejected)} | {row.new:+.2f} "
        f"| {row.previous:+.2f} |"
        for row in worst.itertuples()
    ]
    return f"{len(apart)} of {len(margins)}.\n\n" + "\n".join(lines)
