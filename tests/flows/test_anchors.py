"""Anchors, pairs whose winners are known: a reward model that learns from swapped labels is stopped, and no other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.flows.conftest import ROOT, environment
from tests.flows.homes import folder
from tests.flows.test_recipes import MICRO
from tests.flows.warm import run_warm

PRESET = """
extends = "tiny"
name = "anchored"
without = ["stages.sft", "stages.grpo", "stages.ppo", "data.demonstrations", "promotion"]

[data.prompts]
num_train = 8
num_eval = 8

[data.preferences]
adapter = "preferences"
path = "pairs.jsonl"
num_train = 48
num_eval = 16

[data.known]
contract = "preference_pairs"
adapter = "preferences"
path = "known.jsonl"
num_train = 24
num_eval = 24
max_tokens = 96

[stages.reward_model]
init_from = "base"
gold_pairs = ["known"]
num_epochs = 2
batch_size = 8
learning_rate = 0.01
"""


def write(path: Path, first: int, count: int, *, chosen: str, rejected: str) -> None:
    rows = [
        {
            "pair_id": f"p{number}",
            "messages": [{"role": "user", "content": f"question {number}"}],
            "chosen": chosen,
            "rejected": rejected,
            "source": "test",
        }
        for number in range(first, first + count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.mark.parametrize("swapped", [False, True])
def test_labels_that_are_all_swapped_cannot_pass_where_winners_are_known(tmp_path: Path, swapped: bool) -> None:
    (tmp_path / "anchored.toml").write_text(PRESET, encoding="utf-8")
    sides = ("no", "yes") if swapped else ("yes", "no")
    write(tmp_path / "pairs.jsonl", 0, 64, chosen=sides[0], rejected=sides[1])
    write(tmp_path / "known.jsonl", 64, 24, chosen="yes", rejected="no")
    arguments = ["run", "--preset", str(tmp_path / "anchored.toml")]
    done = run_warm([*arguments, *(part for each in MICRO for part in ("--set", each))], environment(tmp_path), ROOT)
    if swapped:
        assert done.returncode == 1
        assert "accuracy on gold pairs is 0.00 [0.00, 0.14]: the reward model prefers the losers" in done.stderr
        assert "they look swapped" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    metrics = json.loads((folder(tmp_path, "reward_model") / "metrics.json").read_text(encoding="utf-8"))
    assert metrics["rm/gold_pairs"] == 24.0
    assert metrics["rm/gold_accuracy"] == 1.0
    assert metrics["rm/gold_accuracy_low"] > 0.5
