"""A micro run whose rollouts are sampled one iteration ahead: what they were sampled with, and a kill in the middle."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import pandas as pd
import pytest

from tests.flows.conftest import flows_command, run_flows
from tests.flows.homes import folder, kill_when, weights

AHEAD = "stages.grpo.sampling.staleness=1"


@pytest.mark.slow
def test_rollouts_are_one_update_old_and_a_killed_run_ends_bit_for_bit_like_an_uninterrupted_one(
    micro_home: Path, tmp_path: Path
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for home in (whole, killed):
        shutil.copytree(micro_home, home)
        shutil.rmtree(home / "cache" / "grpo")
        shutil.rmtree(home / "work", ignore_errors=True)
    done = run_flows("run", whole, AHEAD)
    assert done.returncode == 0, done.stderr

    kill_when(killed, "work/*/checkpoints/step-000002", flows_command("run", AHEAD))
    assert not list((killed / "cache" / "grpo").glob("*.json"))
    done = run_flows("run", killed, AHEAD)
    assert done.returncode == 0, done.stderr
    assert "resume: after iteration" in done.stderr

    history = json.loads((folder(whole, "grpo") / "history.json").read_text())
    assert [row["staleness"] for row in history] == [0.0, 1.0, 1.0, 1.0]
    for before, row in itertools.pairwise(history):
        assert before["gradient_norm"] == 0.0 or row["mismatch/max_abs"] > 1e-4  # 1e-6 where both have the same weights
    for number, row in enumerate(history, start=1):
        table = pd.read_parquet(folder(whole, "grpo") / "rollouts" / f"iteration-{number:05d}.parquet")
        assert set(table["policy_version"]) == {max(0, number - 2)}, row
    assert weights(whole, "grpo") == weights(killed, "grpo")
    tables = [
        [pd.read_parquet(path) for path in sorted((folder(home, "grpo") / "rollouts").glob("*.parquet"))]
        for home in (whole, killed)
    ]
    assert all(one.equals(other) for one, other in zip(*tables, strict=True))
