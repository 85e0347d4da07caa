"""Rollouts on the page of a run."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from rlcore.tasks.report.run_data import extreme_rollouts
from rlcore.tasks.store.storage import write_json, write_table
from tests.tasks.report.test_rollout_traces import table


def test_the_best_rollout_says_how_many_samples_it_has_and_why(tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    write_json({}, tmp_path / "health.json")
    write_json([{"iteration": 1}], tmp_path / "history.json")
    best, worst = table(1, [1.0, 0.5]).to_dict("records")
    rows = [
        {**best, "branch": 0, "fork": ""},
        {**best, "branch": 1, "fork": "another system message", "text": "A sum"},
        {**worst, "branch": 0, "fork": ""},
    ]
    write_table(pd.DataFrame(rows), tmp_path / "rollouts" / "iteration-00001.parquet")
    (highest, _) = extreme_rollouts({"grpo": tmp_path})
    assert [(row["text"], row["forks"]) for row in highest["rows"]] == [
        ("#### 0", ["another system message"]),
        ("#### 1", []),
    ]
