"""The presets stock and towns on a micro model: an environment is called, paid, evaluated, and resumed exactly."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from rlcore.tasks.store.storage import read_table
from tests.flows.conftest import ROOT, environment
from tests.flows.homes import folder, kill_when, weights
from tests.flows.test_agentic import SETTINGS
from tests.flows.warm import run_warm

pytestmark = pytest.mark.slow

TOOLS = {"stock": "query", "towns": "search"}
ITERATIONS = 3
OWN = (
    "data.prompts.num_train=64",
    f"stages.grpo.num_iterations={ITERATIONS}",
    "stages.grpo.eval_every=3",
    # Right answers are rare so early; a group in which all are paid the same would move no weight.
    "stages.grpo.rewards=[{kind='format',options={style='hashes'}}]",
)


def arguments(preset: str) -> list[str]:
    return ["run", "--preset", preset, *(part for each in (*SETTINGS, *OWN) for part in ("--set", each))]


def run_preset(home: Path, preset: str) -> str:
    """Return the output of a run."""
    done = run_warm(arguments(preset), environment(home), ROOT)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.fixture(scope="module", params=TOOLS)
def played(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A preset, and the home of its run."""
    preset = str(request.param)
    home = tmp_path_factory.mktemp(preset)
    run_preset(home, preset)
    return preset, home


def test_episodes_call_the_environment_and_are_not_trained_on_what_it_says(played: tuple[str, Path]) -> None:
    preset, home = played
    table = read_table(folder(home, "grpo") / "rollouts" / "iteration-00001.parquet")
    called = table[table["text"].str.contains(f"[{TOOLS[preset]}] ", regex=False)]
    assert len(called) > 0
    for row in called.itertuples():
        own = list(row.loss_mask)
        assert own[0]
        assert not all(own)
        assert all(logprob == 0.0 for logprob, is_own in zip(row.sampler_logprobs, own, strict=True) if not is_own)
    history = json.loads((folder(home, "grpo") / "history.json").read_text())
    assert all(0.0 < row["episode/with_calls"] <= 1.0 for row in history)
    assert all(row["mismatch/max_abs"] < 1e-3 for row in history)
    assert all(row["reward/errors"] == 0.0 for row in history)


def test_checkpoints_are_evaluated_in_the_same_episodes(played: tuple[str, Path]) -> None:
    preset, home = played
    answers = read_table(folder(home, "evaluate_sft") / "answers.parquet")
    assert answers["completion"].str.contains(f"[{TOOLS[preset]}] ", regex=False).any()


def test_a_kill_in_the_middle_of_the_rl_stage_changes_no_bit(played: tuple[str, Path], tmp_path: Path) -> None:
    preset, undisturbed = played
    code = f"from rlcore.flows.run import run_targets; run_targets({preset!r}, {(*SETTINGS, *OWN)!r}, ['grpo'])"
    command = [sys.executable, "-c", code]
    home = tmp_path / "home"
    kill_when(home, "work/*/checkpoints/step-000001", command)
    assert not list((home / "cache" / "grpo").glob("*.json"))
    done = subprocess.run(command, env=environment(home), cwd=ROOT, capture_output=True, text=True, check=False)
    assert "resume: after iteration" in done.stderr, done.stderr
    assert weights(home, "grpo") == weights(undisturbed, "grpo") != weights(home, "sft")
    for number in range(1, ITERATIONS + 1):
        name = f"rollouts/iteration-{number:05d}.parquet"
        again, before = (read_table(folder(each, "grpo") / name) for each in (home, undisturbed))
        pd.testing.assert_frame_equal(again, before)
