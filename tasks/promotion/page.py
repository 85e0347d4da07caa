"""Page of a promotion decision: all checks with intervals, and the answers that changed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from rlcore.evaluation.promotion import PromotionDecision
from rlcore.strict_config import build
from rlcore.tasks.drawing.levels import check_table
from rlcore.tasks.drawing.result import Result
from rlcore.tasks.kinds.compare.step import greedy_answers
from rlcore.tasks.kinds.win_rate.page import headline
from rlcore.tasks.promotion.kind import WINS
from rlcore.tasks.promotion.step import evaluations
from rlcore.tasks.store.markdown import excerpt, plain
from rlcore.tasks.store.storage import read_json

_SHOWN = 5


def promotion_page(result: Result, folder: Path) -> str:
    """Write ``verdict.md``."""
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
