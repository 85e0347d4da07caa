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


def policies(home: Path, length: int) -> dict[bool, Path]:
    """The results of GRPO runs of this length, by whether a rule stopped them."""
    records = [json.loads(path.read_text()) for path in (home / "cache" / "grpo").glob("*.json")]
    same = [each for each in records if each["ingredients"]["config"]["stage"]["num_iterations"] == length]
    return {"outcome" in each["ingredients"]: home / str(each["ref"]["uri"]) for each in same}


def plan_of_grpo(home: Path, *overrides: str) -> str:
    """The state and reason of GRPO in the plan."""
    done = run_flows("plan", home, ALONE, *overrides)
    assert done.returncode == 0, done.stderr
    return next(" ".join(line.split()[1:]) for line in done.stdout.splitlines() if line.startswith("grpo "))


def test_a_wrecked_run_is_stopped_and_its_result_is_the_last_healthy_checkpoint(
    micro_home: Path, tmp_path: Path
) -> None:
    home, other = tmp_path / "home", tmp_path / "other"
    shutil.copytree(micro_home, home)
    shutil.copytree(micro_home, other)
    # One checkpoint, after the first iteration: from there on the run is done once more, up to where it was sound.
    rare = ("stages.grpo.num_iterations=9", "stages.grpo.checkpoints.every_iterations=0", *WRECKED)
    done = run_flows("run", home, ALONE, *rare)
    assert done.returncode == 0, done.stderr
    folder = policies(home, 9)[True]
    health = json.loads((folder / "health.json").read_text())
    history = json.loads((folder / "history.json").read_text())
    stopped = health["stopped"]
    is_over = [row["kl/ref"] > 0.03 for row in history + stopped["dropped"]]
    first_over = next(place for place, pair in enumerate(itertools.pairwise(is_over), start=1) if all(pair))
    # Rollouts of an iteration show the weights after the one before: two iterations back they were seen to be sound.
    assert stopped["result_iteration"] == len(history) == first_over - 2
    assert stopped["iteration"] == first_over + 1 < 9
    assert len(history) + len(stopped["dropped"]) == stopped["iteration"]
    assert [finding["level"] for finding in health["findings"] if finding["rule"] == "kl"][-2:] == ["alarm", "stop"]
    assert "stopped after iteration" in done.stderr
    assert "restore iteration=" in done.stderr and "from_checkpoint=1 " in done.stderr

    # The clock decides which checkpoints there are, and no number: one after each iteration, and the weights are equal.
    often = ("stages.grpo.num_iterations=9", "stages.grpo.checkpoints.every_iterations=1", *WRECKED)
    assert plan_of_grpo(home, *often).startswith("cached")
    done = run_flows("run", other, ALONE, *often)
    assert done.returncode == 0, done.stderr
    weights = "model/model.safetensors"
    assert (policies(other, 9)[True] / weights).read_bytes() == (folder / weights).read_bytes()

    # Without the rule that run continues from its last checkpoint, and each of the two results serves its own rules.
    weak, newest = (*often, "health.action='warn'"), stopped["iteration"] - 1
    assert plan_of_grpo(other, *weak) == (
        f"run resumes at iteration {newest + 1} of 9: health.kl stopped the earlier run after iteration {newest + 1}, "
        "and no longer does"
    )
    done = run_flows("run", other, ALONE, *weak)
    assert f"resume: after iteration {newest} of 9" in done.stderr, done.stderr
    assert policies(other, 9).keys() == {True, False}
    assert plan_of_grpo(other, *often) == plan_of_grpo(other, *weak) == "cached"
    sooner = plan_of_grpo(other, *often, "health.kl.patience=1")
    assert sooner == f"run restarts: health.kl stops the earlier run after iteration {stopped['iteration'] - 1}"


@pytest.mark.slow
def test_a_run_that_was_never_healthy_fails_with_the_rule_and_its_fix(micro_home: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    shutil.copytree(micro_home, home)
    done = run_flows("run", home, ALONE, "health.clip.warn=-2.0", "health.clip.stop=-1.0", "health.clip.patience=1")
    assert done.returncode == 1
    assert "health.clip" in done.stderr and "no healthy checkpoint exists" in done.stderr
    assert "lower learning_rate" in done.stderr
