"""Changes between two runs: how a run is watched costs no training, and more iterations cost only these.

A run is a copy of a home in which everything before GRPO is made.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.flows.conftest import ROOT, environment, flows_arguments, flows_command
from tests.flows.homes import kill_when, without
from tests.flows.micro import ONE_LAYER
from tests.flows.warm import run_warm

pytestmark = pytest.mark.slow

SMALL = (
    *ONE_LAYER,
    "without=['stages.ppo']",
    "stages.sft.num_steps=6",
    "stages.reward_model.audit_folds=0",
    "stages.grpo.rewards=[{kind='reward_model',stage='reward_model',weight=1.0}]",  # differs within groups
    "stages.grpo.sampling.max_new_tokens=8",
    "stages.grpo.eval_every=2",
    "stages.grpo.checkpoints.every_iterations=1",
    "data.prompts.num_train=60",
    "data.demonstrations.num_train=100",
    "evaluation.num_problems=16",
    "evaluation.num_samples=0",
    "evaluation.max_new_tokens=8",
)
ADAPTER = "rlcore.examples.arithmetic:ADAPTER"
WATCHED = (
    "stages.grpo.eval_every=1",
    "evaluation.num_problems=8",
    "evaluation.confidence=0.9",
    "evaluation.verifiers=[{kind='reward_model',stage='reward_model'}]",
    "health.action='warn'",
    "health.audit.action='off'",
)
OTHER_DATA = (
    f"data.more={{contract='prompts',adapter='{ADAPTER}',num_train=9,num_eval=8,max_tokens=96}}",
    "evaluation.data=['more']",
)
GRPO, STAGES = "stages.grpo", ("sft", "grpo", "evaluate_grpo")


def iterations(count: int) -> str:
    return f"{GRPO}.num_iterations={count}"


def started(home: Path, command: str, *overrides: str) -> str:
    """Run a command to its end; what it said."""
    done = run_warm(flows_arguments(command, *SMALL, *overrides), environment(home), ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def planned(home: Path, *overrides: str) -> dict[str, str]:
    """The state and reason of each stage in the plan."""
    lines = (line.split() for line in started(home, "plan", *overrides).splitlines())
    return {words[0]: " ".join(words[1:]) for words in lines if words and words[0] in STAGES}


def result(home: Path, count: int) -> dict[str, Any]:
    """Weights, optimizer, rollouts and history of a finished run, without costs."""
    records = [json.loads(path.read_text()) for path in (home / "cache/grpo").glob("*.json")]
    (uri,) = (
        each["ref"]["uri"] for each in records if each["ingredients"]["config"]["stage"]["num_iterations"] == count
    )
    checkpoint = home / "checkpoints/tiny/grpo/checkpoints" / f"step-{count:06d}"
    tables = sorted((home / uri / "rollouts").glob("*.parquet"))
    costs = ("second", "memory", "tokens_per")
    return {
        "history": [
            {name: value for name, value in row.items() if not any(word in name for word in costs)}
            for row in json.loads((home / uri / "history.json").read_text())
        ],
        "rollouts": {path.name: path.read_bytes() for path in tables},
        "model": (home / uri / "model/model.safetensors").read_bytes(),
        **{name: (checkpoint / f"{name}.safetensors").read_bytes() for name in ("policy", "optimizer")},
    }


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The home of a run with four iterations."""
    home = tmp_path_factory.mktemp("four") / "home"
    started(home, "run", iterations(4))
    return home


@pytest.fixture(scope="module")
def six(four: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The result of six iterations that were asked for at once."""
    home = without(four, tmp_path_factory.mktemp("six") / "home", "grpo")
    started(home, "run", iterations(6))
    return result(home, 6)


def copied(home: Path, folder: Path) -> Path:
    return Path(shutil.copytree(home, folder / "home"))


def test_what_only_watches_a_run_trains_nothing_anew(four: Path, tmp_path: Path) -> None:
    home, expected = copied(four, tmp_path), result(four, 4)
    assert any(row["gradient_norm"] > 0.0 for row in expected["history"])
    assert planned(home, iterations(4))["grpo"] == "cached"
    found = planned(home, iterations(4), *WATCHED)
    assert found["grpo"].startswith(
        "cached weights and recorded curve are reused although evaluation.confidence changed (0.95 -> 0.9)"
    )
    assert "eval_every changed (2 -> 1)" in found["grpo"]
    assert 'health.action changed ("stop" -> "warn")' in found["grpo"]
    assert "evaluation.num_problems changed (16 -> 8)" in found["evaluate_grpo"]
    said = started(home, "run", iterations(4), *WATCHED, *OTHER_DATA)
    assert "grpo: cached" in said and " grpo: start" not in said and "evaluate_grpo: start" in said
    assert " reward_model: start" not in said and "| greedy accuracy | 90 % interval |" in said
    others = "Cached with intervals of another level: reward_model (95 %), grpo (95 %)."
    assert [path for path in home.glob("reports/*/report.html") if others in path.read_text()]
    assert others in said and result(home, 4) == expected


def test_more_iterations_extend_a_finished_run_to_what_it_would_be_at_once(
    four: Path, six: dict[str, Any], tmp_path: Path
) -> None:
    home = copied(four, tmp_path)
    assert planned(home, iterations(6))["grpo"] == "run extends from 4 to 6"
    said = started(home, "run", iterations(6))
    assert "grpo: extends from 4 to 6" in said and "iteration 4/6" not in said and "iteration 5/6" in said
    assert result(home, 6) == six
    assert planned(home, iterations(4))["grpo"] == planned(home, iterations(6))["grpo"] == "cached"


def test_more_iterations_extend_a_killed_run_to_what_it_would_be_at_once(
    four: Path, six: dict[str, Any], tmp_path: Path
) -> None:
    home = without(four, tmp_path / "home", "grpo")
    kill_when(home, "work/*/checkpoints/step-000002", flows_command("run", *SMALL, iterations(4)))
    (newest,) = (max(int(path.name[-1]) for path in home.glob("work/*/checkpoints/step-*")),)
    if newest < 4:
        assert planned(home, iterations(4))["grpo"] == f"run resumes at iteration {newest + 1} of 4"
    words = f"resumes at iteration {newest + 1} of 6"
    assert planned(home, iterations(6))["grpo"] == f"run {words}"
    assert f"grpo: {words}" in started(home, "run", iterations(6))
    assert result(home, 6) == six


def test_a_plan_says_what_restarts_a_run_and_why(four: Path) -> None:
    rate = planned(four, iterations(4), f"{GRPO}.learning_rate=2e-5", "stages.sft.eval_every=5")
    assert rate["grpo"] == "run restarts: learning_rate changed (0.0003 -> 2e-05)"
    assert rate["sft"].startswith("cached weights and recorded curve are reused although eval_every changed")
    fewer = planned(four, iterations(2))
    assert fewer["grpo"] == "run restarts: num_iterations changed (4 -> 2): no usable checkpoint up to 2 is kept"
    assert planned(four, iterations(3))["grpo"] == "run resumes after iteration 3 of 3, the last"
    ahead = planned(four, iterations(6), f"{GRPO}.update.optim.schedule=linear")["grpo"]
    assert ahead.startswith("run restarts: num_iterations changed (4 -> 6), update.optim.schedule changed (")
    longer = planned(four, "stages.sft.num_steps=7")
    assert longer["sft"] == (
        "run restarts: num_steps changed (6 -> 7): the kind 'sft' keeps no checkpoint to continue from"
    )
