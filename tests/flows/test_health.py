"""A micro run with a learning rate that wrecks the policy: it is stopped, and its result is from before that."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import pytest

from tests.flows.conftest import run_flows
from tests.flows.micro import WRECKED

ALONE = 'without=["stages.ppo"]'


def policy_folder(home: Path, since: set[Path]) -> Path:
    (record,) = set((home / "cache" / "grpo").glob("*.json")) - since
    return home / str(json.loads(record.read_text())["ref"]["uri"])


def test_a_wrecked_run_is_stopped_and_its_result_is_the_last_healthy_checkpoint(
    micro_home: Path, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    shutil.copytree(micro_home, home)
    known = set((home / "cache" / "grpo").glob("*.json"))
    # One checkpoint, after the first iteration: from there on the run is done once more, up to where it was sound.
    done = run_flows(
        "run", home, ALONE, "stages.grpo.num_iterations=12", "stages.grpo.checkpoints.every_iterations=0", *WRECKED
    )
    assert done.returncode == 0, done.stderr
    folder = policy_folder(home, known)
    health = json.loads((folder / "health.json").read_text())
    history = json.loads((folder / "history.json").read_text())
    stopped = health["stopped"]
    is_over = [row["kl/ref"] > 0.03 for row in history + stopped["dropped"]]
    first_over = next(place for place, pair in enumerate(itertools.pairwise(is_over), start=1) if all(pair))
    # Rollouts of an iteration show the weights after the one before: two iterations back they were seen to be sound.
    assert stopped["result_iteration"] == len(history) == first_over - 2
    assert stopped["iteration"] == first_over + 1 < 12
    assert len(history) + len(stopped["dropped"]) == stopped["iteration"]
    assert [finding["level"] for finding in health["findings"] if finding["rule"] == "kl"][-2:] == ["alarm", "stop"]
    assert "stopped after iteration" in done.stderr
    assert "restore iteration=" in done.stderr and "from_checkpoint=1 " in done.stderr

    # The clock decides which checkpoints there are, and no number: one after each iteration, and the weights are equal.
    known |= set((home / "cache" / "grpo").glob("*.json"))
    done = run_flows(
        "run", home, ALONE, "stages.grpo.num_iterations=12", "stages.grpo.checkpoints.every_iterations=1", *WRECKED
    )
    assert done.returncode == 0, done.stderr
    weights = "model/model.safetensors"
    assert (policy_folder(home, known) / weights).read_bytes() == (folder / weights).read_bytes()


@pytest.mark.slow
def test_a_run_that_was_never_healthy_fails_with_the_rule_and_its_fix(micro_home: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    shutil.copytree(micro_home, home)
    done = run_flows("run", home, ALONE, "health.clip.warn=-2.0", "health.clip.stop=-1.0", "health.clip.patience=1")
    assert done.returncode == 1
    assert "health.clip" in done.stderr and "no healthy checkpoint exists" in done.stderr
    assert "lower learning_rate" in done.stderr
