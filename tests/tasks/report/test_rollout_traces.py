from __future__ import annotations

from pathlib import Path

import pandas as pd

from rlcore.tasks.report.rollout_traces import rollout_traces
from rlcore.tasks.store.storage import write_json, write_table


def table(iteration: int, values: list[float | None]) -> pd.DataFrame:
    rows = [
        {
            "iteration": iteration,
            "prompt_id": f"p{number}",
            "prompt": f"{number}+1",
            "reference": "1",
            "text": f"#### {number}",
            "policy_version": iteration - 1,
            "finish_reason": "stop",
            "value": value,
            "parts": f'{{"math": {value or 0.0}}}',
        }
        for number, value in enumerate(values)
    ]
    return pd.DataFrame(rows)


def test_an_episode_is_a_tree_of_its_turns_and_branches(tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    write_json({}, tmp_path / "health.json")
    calls = '[["<add>3+4", "calculator", "7", false]]'
    first = {"branch": 0, "fork": "", "calls": calls, "text": "<add>3+4\n[calculator] 7\n#### 7"}
    second = {"branch": 1, "fork": "another system message", "calls": "[]", "text": "A sum"}
    (row, other) = table(1, [1.0, 0.5]).to_dict("records")
    rows = [{**row, **first}, {**row, **second}, {**other, "branch": 0, "fork": "", "calls": "[]"}]
    write_table(pd.DataFrame(rows), tmp_path / "rollouts" / "iteration-00001.parquet")
    best, plain, *_ = rollout_traces("grpo", {"grpo": tmp_path}, [("grpo", "sft")])
    assert best.tags["samples"] == "2"
    ask, answer, branch = best.steps
    assert (ask.name, ask.outputs) == ("turn 1", {"text": "<add>3+4", "tool": "calculator"})
    assert (answer.name, answer.inputs, answer.outputs) == ("turn 2", {"output": "7"}, {"text": "#### 7"})
    assert (branch.name, branch.inputs, branch.outputs) == (
        "branch 1",
        {"fork": "another system message"},
        {"text": "A sum"},
    )
    assert (plain.steps, "samples" in plain.tags) == ((), False)


def test_the_best_and_worst_of_the_last_iteration_come_first_then_the_middle_of_either_end(tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    write_json({}, tmp_path / "health.json")
    write_table(table(1, [0.5, 0.25, 0.75]), tmp_path / "rollouts" / "iteration-00001.parquet")
    write_table(table(2, [0.0, 1.0, None, 0.5, 0.25, 0.75]), tmp_path / "rollouts" / "iteration-00002.parquet")
    traces = rollout_traces("grpo", {"grpo": tmp_path}, [("grpo", "sft")])
    told = [(each.tags["kind"], each.tags["iteration"], each.tags["reward"]) for each in traces]
    assert told == [
        ("best", "2", "1"),
        ("best", "2", "0.75"),
        ("worst", "2", "0"),
        ("worst", "2", "0.25"),
        ("middle", "1", "0.5"),
        ("middle", "2", "0.5"),
    ]
    assert traces[0].inputs == {"prompt": "1+1", "reference": "1"}
    assert traces[0].outputs == {"completion": "#### 1"}
    assert (traces[0].tags["policy_version"], traces[0].tags["reward.math"]) == ("1", "1")
