"""A run that draws prompts by their pass rates: what it measures, what it draws, and that a kill changes neither."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pandas as pd
import pytest

from rlcore.data_contracts.contracts.contract import require
from rlcore.data_contracts.contracts.results import DIFFICULTIES
from rlcore.flows.presets import open_preset
from rlcore.metrics import check_names
from rlcore.tasks.presets.graph import checkpoints, needed_stages, required_by
from rlcore.tasks.store.storage import read_table
from tests.flows.conftest import ROOT, arguments, environment, ran
from tests.flows.curriculum_rewards import DIE, is_odd
from tests.flows.homes import folder, record, weights
from tests.flows.test_recipes import overrides_of
from tests.flows.warm import run_warm

REWARDS = "tests.flows.curriculum_rewards"
SMALL = (
    *(setting for setting in overrides_of("curriculum") if not setting.startswith("stages.uniform.")),
    'without=["stages.uniform"]',
    f"stages.difficulty.rewards=[{{kind='{REWARDS}:sometimes'}}]",
    f"stages.grpo.rewards=[{{kind='{REWARDS}:length_until_killed',weight=1.0}}]",
    "stages.difficulty.num_prompts=20",
    "stages.grpo.curriculum.min_pass_rate=0.4",
    "stages.grpo.curriculum.max_pass_rate=0.6",
    "stages.grpo.num_iterations=4",
    "stages.grpo.checkpoints.every_iterations=1",
)


FOLLOWED = (
    "stages.grpo.curriculum.min_pass_rate=0.0",  # all of the twenty prompts, once an epoch
    "stages.grpo.curriculum.weighting=even",
    "stages.grpo.sampling.zero_signal_keep_prob=0.0",
    f"stages.grpo.rewards=[{{kind='{REWARDS}:text_of_odd_until_killed',weight=1.0}}]",
    "stages.grpo.num_iterations=8",
    "health.action=off",
)


def run(home: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    return run_warm(arguments("run", "curriculum", *SMALL, *overrides), environment(home), ROOT)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("curriculum")
    ran(made, "curriculum", *SMALL)
    return made


def rollouts(home: Path) -> list[pd.DataFrame]:
    return [read_table(path) for path in sorted((folder(home, "grpo") / "rollouts").glob("*.parquet"))]


def test_the_pass_rate_of_each_prompt_is_recorded_with_its_interval(home: Path) -> None:
    table = read_table(folder(home, "difficulty") / "difficulty.parquet")
    require(table, DIFFICULTIES)
    train = read_table(folder(home, "prepare_prompts") / "train.parquet").set_index("prompt_id")["reference"]
    assert len(table) == 20
    assert table["prompt_id"].nunique() == 20
    assert set(table["answers"]) == {8}
    assert [4 if is_odd(train[name]) else 0 for name in table["prompt_id"]] == table["passed"].tolist()
    half = table[table["passed"] == 4].iloc[0]
    assert (round(half["low"], 3), half["pass_rate"], round(half["high"], 3)) == (0.215, 0.5, 0.785)  # Wilson, 4 of 8


def test_the_account_the_metrics_and_the_page_tell_the_same(home: Path) -> None:
    account = json.loads((folder(home, "difficulty") / "difficulty.json").read_text())
    metrics = record(home, "difficulty")["metrics"]
    check_names(metrics)
    odd = account["prompts"] - account["never"]
    assert account["histogram"] == [[0.0, account["never"]], [0.5, odd]]
    assert (metrics["difficulty/prompts"], metrics["difficulty/answers"]) == (20.0, 160.0)
    assert metrics["difficulty/pass_rate"] == pytest.approx(0.5 * odd / 20)
    (page,) = home.glob("pages/*/difficulty/*/difficulty.md")
    assert f"Never solved: {account['never']} prompts; always: 0; without a scored answer: 0." in page.read_text()
    assert (page.parent / "histogram.png").stat().st_size > 1000


def test_an_rl_stage_draws_from_the_band_alone(home: Path) -> None:
    table = read_table(folder(home, "difficulty") / "difficulty.parquet")
    inside = set(table.loc[table["passed"] == 4, "prompt_id"])
    drawn = [name for each in rollouts(home) for name in each["prompt_id"].tolist()[::2]]  # groups of two
    assert set(drawn) <= inside
    assert len(drawn) == 16
    assert len(set(drawn)) == min(16, len(inside))  # all of the band come before one comes again
    assert record(home, "grpo")["ingredients"]["inputs"]["difficulty"] == record(home, "difficulty")["ref"]["sha256"]


@pytest.mark.slow  # tests/rlcore/loop/test_prompts.py and test_resume.py have the skipping, and its state after a kill
def test_a_run_passes_over_prompts_whose_groups_had_no_signal_and_a_kill_changes_nothing(
    home: Path, tmp_path: Path
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for each in (whole, killed):
        shutil.copytree(home, each)
        shutil.rmtree(each / "cache" / "grpo")
    (killed / DIE).touch()
    assert run(killed, *FOLLOWED).returncode == -9
    assert not list((killed / "cache" / "grpo").glob("*.json"))
    for each in (whole, killed):
        done = run(each, *FOLLOWED)
        assert done.returncode == 0, done.stderr
    assert "resume: after iteration 2" in done.stderr
    assert all(one.equals(other) for one, other in zip(rollouts(whole), rollouts(killed), strict=True))
    assert weights(whole, "grpo") == weights(killed, "grpo")
    groups = pd.concat(rollouts(whole)).groupby(["iteration", "prompt_id"])["value"].nunique() > 1
    first, later = groups.loc[:5], groups.loc[6:]
    assert len(first) == 20  # an epoch: nothing is known of a prompt before its first turn
    assert first.mean() < 0.8 < later.mean()


def test_the_graph_has_the_stage_before_the_run_that_draws_by_it_and_makes_no_checkpoint_of_it() -> None:
    config = open_preset("curriculum")
    assert needed_stages(config)["grpo"] == ("sft", "difficulty")
    assert "difficulty" not in checkpoints(config)
    assert set(required_by(config, ["grpo"])[0]) == {"sft", "difficulty", "grpo"}
