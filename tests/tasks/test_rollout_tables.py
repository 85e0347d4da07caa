"""The sample of an iteration's rollouts that MLflow displays."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd

from tasks.rollout_tables import SAMPLE_ROWS, write_sample
from tasks.settings import Home
from tasks.tracking import open_tracker


def frame(count: int) -> pd.DataFrame:
    """Rollouts of which the second was not scored."""
    return pd.DataFrame(
        [
            {
                "iteration": 3,
                "prompt_id": f"p{number}",
                "sample_index": 0,
                "prompt": "1+1",
                "reference": "2",
                "text": f"text {number}",
                "completion_ids": [1] * (number + 1),
                "value": float("nan") if number == 1 else 0.5,
                "parts": json.dumps({} if number == 1 else {"math": 1.0, "length": -0.5}),
                "finish_reason": "stop",
                "error": "no answer" if number == 1 else "",
            }
            for number in range(count)
        ]
    )


def test_a_sample_has_a_column_for_every_part_and_gaps_where_there_is_none(tmp_path: Path) -> None:
    write_sample(frame(40), tmp_path / "sample.json")
    table = json.loads((tmp_path / "sample.json").read_text())
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    assert len(rows) == SAMPLE_ROWS == 16
    assert (rows[0]["reward"], rows[0]["part/math"], rows[0]["part/length"], rows[0]["tokens"]) == (0.5, 1.0, -0.5, 1)
    assert (rows[1]["reward"], rows[1]["part/math"], rows[1]["error"]) == (None, None, "no answer")
    assert {row["iteration"] for row in rows} == {3}


def test_mlflow_reads_each_table_once_and_knows_the_newest_hundred(tracked_home: Home, tmp_path: Path) -> None:
    tracker = open_tracker(tracked_home)
    write_sample(frame(2), tmp_path / "first.json")
    with tracker.start_run("e", "r", tags={}) as run:
        for number in range(101):
            path = tmp_path / f"iteration-{number}.json"
            path.write_bytes((tmp_path / "first.json").read_bytes())
            run.log_table(path, "samples")
    resumed = tracker.reopen_run(run.run_id)
    assert resumed is not None
    resumed.log_table(tmp_path / "iteration-100.json", "samples")  # a second time after a resume
    tag = tracker.client.get_run(run.run_id).data.tags["mlflow.loggedArtifacts"]
    paths = [entry["path"] for entry in json.loads(tag)]
    assert len(tag) < 8000  # MLflow's limit
    assert paths == [f"samples/iteration-{number}.json" for number in range(1, 101)]
    shown = tracker.client.load_table(run.experiment_id, "samples/iteration-100.json", run_ids=[run.run_id])
    assert list(shown["prompt_id"]) == ["p0", "p1"]
