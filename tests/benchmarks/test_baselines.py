"""The table of baselines: what an arm cost is that of all its stages, and equal cost is the least that all reached."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from benchmarks import baselines
from flows.presets import open_preset
from tasks.home.storage import write_json, write_table
from tasks.preset.graph import contrasts
from tasks.report.head_to_head import standings


def made(folder: Path, **files: Any) -> Path:
    folder.mkdir(parents=True)
    for name, value in files.items():
        write_json(value, folder / f"{name}.json")
    return folder


def folders_of(home: Path) -> dict[str, Path]:
    figures = {"eval/accuracy": 0.5, "eval/accuracy_low": 0.4, "eval/accuracy_high": 0.6}
    sampled = {f"eval/pass_{k}{end}": k / 10 for k in (1, 8) for end in ("", "_low", "_high")}
    difference = {"mean": 0.25, "low": 0.125, "high": 0.5, "n": 8}
    (home / "rejection" / "rollouts").mkdir(parents=True)
    for number, lengths in enumerate([(2, 3), (5,)]):
        table = pd.DataFrame({"completion_ids": [[1] * length for length in lengths]})
        write_table(table, home / "rejection" / "rollouts" / f"{number}.parquet")
    return {
        "rejection": home / "rejection",
        "kept": made(home / "kept"),
        "evaluate_kept": made(home / "evaluate_kept", summary=figures),
        "evaluate_sft": made(home / "evaluate_sft", summary=figures | sampled),
        "compare": made(home / "compare", comparison={"differences": {"kept - sft": {"difference": difference}}}),
    }


def test_an_arm_costs_what_all_of_its_stages_did_and_gains_what_the_comparison_says(tmp_path: Path) -> None:
    arm = next(each for each in baselines.ARMS if each.stages == ("rejection", "kept"))
    row = baselines.row_of(arm, folders_of(tmp_path), {"rejection": 3.0, "kept": 4.0})
    assert (row.completions, row.tokens, row.seconds) == (3.0, 10.0, 7.0)
    assert row.gain == "+0.250 [+0.125, +0.500]"
    assert "| 3 | 10 | 7 | 0.500 [0.400, 0.600] | +0.250 [+0.125, +0.500] |" in baselines.table({arm.label: row})


def test_the_best_of_n_is_the_largest_pass_at_n_of_the_start(tmp_path: Path) -> None:
    row = baselines.best_of_n(folders_of(tmp_path))
    assert (row.accuracy, row.gain) == (0.8, "n = 8")


def history(tokens: float, *accuracies: float) -> list[dict[str, float]]:
    cost = {f"seconds/{part}": 1.0 for part in ("rollout", "score", "update", "sync")}
    return [
        {
            "iteration": number,
            "rollouts/count": 8.0,
            "rollouts/tokens": tokens,
            "reward/mean": 0.0,
            **cost,
            **{f"eval/accuracy{end}": accuracy for end in ("", "_low", "_high")},
        }
        for number, accuracy in enumerate(accuracies, start=1)
    ]


def test_at_equal_tokens_an_arm_of_long_answers_stands_where_it_had_drawn_as_many() -> None:
    runs = {
        "long": standings(history(20.0, 0.1, 0.2, 0.3)),
        "short": standings(history(10.0, 0.4, 0.5, 0.6)),
        "DPO": [],
    }
    lines = baselines.equal_cost({0: runs, 1: runs}).splitlines()
    assert "| samples | long | 0.300 | 0.300 to 0.300 |" in lines
    assert "| tokens | long | 0.100 | 0.100 to 0.100 |" in lines  # 30 tokens: one iteration of 20
    assert "| tokens | short | 0.600 | 0.600 to 0.600 |" in lines
    assert not any("DPO" in line for line in lines)


@pytest.mark.parametrize(("preset", "completions"), [("baselines", 2560), ("baselines_smollm2", 1024)])
def test_every_arm_is_a_stage_of_the_preset_and_is_held_against_sft(preset: str, completions: int) -> None:
    config = open_preset(preset)
    assert {name for arm in baselines.ARMS for name in arm.stages} == set(config.stages)
    held = {new for new, old in contrasts(config) if old == "sft"}
    assert {arm.stages[-1] for arm in baselines.ARMS} - {"sft"} == held
    drawn = {
        name: each.settings.num_iterations * each.settings.prompts_per_iteration * each.settings.group_size
        for name, each in config.stages.items()
        if each.kind == "rl"
    }
    rejection = config.stages["rejection"].settings
    assert {*drawn.values(), rejection.num_prompts * rejection.num_samples} == {completions}
