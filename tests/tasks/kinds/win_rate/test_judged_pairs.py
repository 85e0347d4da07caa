"""Verdicts in chunks on disk: nothing is asked twice, and a judge that fails too often ends the stage."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pandas as pd
import pytest

from rlcore.errors import RewardError
from rlcore.rewards.pairs import Judgement, Pair
from rlcore.tasks.kinds.win_rate.judged_pairs import PAIRS_PER_CHUNK, JudgedPairs, judge_pairs, reasons_of
from rlcore.tasks.steps.base import StageContext
from rlcore.types import Message


class Longer:
    """The longer answer wins; it fails from its ``fails_from``-th pair on, and counts what it is asked."""

    def __init__(self, fails_from: int = 10**9) -> None:
        self.asked, self.fails_from = 0, fails_from

    def __call__(self, pairs: Sequence[Pair]) -> list[Judgement]:
        found = []
        for pair in pairs:
            failed = self.asked >= self.fails_from
            value = None if failed else float(len(pair.first) > len(pair.second))
            found.append(Judgement(value=value, error="too slow" if failed else "", prompt_tokens=7, cost=0.5))
            self.asked += 1
        return found


def context(folder: Path, max_unjudged: float = 0.1) -> StageContext:
    settings = SimpleNamespace(max_unjudged=max_unjudged)
    config = SimpleNamespace(stage=SimpleNamespace(settings=settings))
    made: Any = SimpleNamespace(work=folder, stage="win_rate", config=config, report_progress=lambda *_: None)
    return cast(StageContext, made)


def pairs(count: int) -> list[JudgedPairs]:
    asked = (Message(role="user", content="?"),)
    return [(f"p{number}", Pair(messages=asked, first="long", second="s"), "") for number in range(count)]


def test_each_pair_is_asked_in_both_orders_and_a_stage_that_goes_on_asks_for_the_rest_alone(tmp_path: Path) -> None:
    first, second = Longer(), Longer()
    count = PAIRS_PER_CHUNK + 10
    whole = judge_pairs(context(tmp_path), first, pairs(count), name="verdicts")
    assert first.asked == 2 * count == whole["calls"].sum()
    assert (set(whole["forward"]), set(whole["backward"])) == ({1.0}, {1.0})
    assert (whole["tokens"].sum(), whole["cost"].sum()) == (14 * count, count)
    (tmp_path / "verdicts" / "chunk-00001.parquet").unlink()
    again = judge_pairs(context(tmp_path), second, pairs(count), name="verdicts")
    assert second.asked == 20
    assert again.equals(whole)


def test_what_has_no_answer_is_unjudged_with_its_reason_and_costs_nothing(tmp_path: Path) -> None:
    asked: list[JudgedPairs] = [*pairs(9), ("lost", None, "no answer: the engine failed")]
    table = judge_pairs(context(tmp_path), Longer(), asked, name="verdicts")
    row = table.iloc[-1]
    assert (row["error"], row["calls"], bool(row["asked"])) == ("no answer: the engine failed", 0, False)
    assert table["forward"].isna().tolist() == [False] * 9 + [True]


def test_too_many_unjudged_end_the_stage_which_asks_again_when_it_goes_on(tmp_path: Path) -> None:
    count = 2 * PAIRS_PER_CHUNK
    with pytest.raises(RewardError, match=r"judge failed on 14 of 128 pairs \(limit 12.8\), 14 times with: too slow"):
        judge_pairs(context(tmp_path), Longer(fails_from=4 * PAIRS_PER_CHUNK - 28), pairs(count), name="verdicts")
    repaired = Longer()
    assert len(judge_pairs(context(tmp_path), repaired, pairs(count), name="verdicts")) == count
    assert repaired.asked == 2 * PAIRS_PER_CHUNK  # the chunk that was refused


def test_what_a_judge_wrote_is_no_part_of_why_a_pair_is_unjudged() -> None:
    table = pd.DataFrame({"error": ["no verdict: 'I like'", 'no verdict: "it\'s\nfine"', "too slow", ""]})
    assert reasons_of(table) == {"no verdict": 2, "too slow": 1}


def test_no_pairs_make_an_empty_table_with_its_columns(tmp_path: Path) -> None:
    table = judge_pairs(context(tmp_path), Longer(), [], name="audit")
    assert table.empty
    assert {"forward", "backward", "calls", "cost", "error"} <= set(table.columns)
