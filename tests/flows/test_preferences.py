"""Preferences in runs: DPO, gold pairs of a reward model, win rates by each kind of judge."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlcore.flows.presets import open_preset
from rlcore.flows.stages import stages
from rlcore.metrics import check_names
from rlcore.tasks.presets.graph import checkpoints, contrasts, required_by
from rlcore.tasks.store.storage import read_table
from tests.chaos.books import repeated_points
from tests.flows.conftest import ROOT, arguments, environment, ran
from tests.flows.homes import folder, record, weights, without
from tests.flows.micro import MICRO as TINY
from tests.flows.test_recipes import MICRO, comparison, overrides_of
from tests.flows.warm import run_warm
from tests.processes import wait_for_line

DPO = "rlhf_dpo"


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The preset on pairs of which the better side is always the same word."""
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    write_pairs(path, 0, 64, chosen="yes", rejected="no")
    own = ("adapter=preferences", f"path={path}", "num_train=48", "num_eval=6")
    learning = ("num_epochs=2", "batch_size=8", "learning_rate=0.01", "eval_every=4")
    found = [*overrides_of(DPO), *(f"data.preferences.{each}" for each in own)]
    return [*found, *(f"stages.dpo.{each}" for each in learning)]


def dpo_ran(dpo_home: Path, settings: list[str], *overrides: str) -> Path:
    ran(dpo_home, DPO, *settings, *overrides)
    return dpo_home


@pytest.fixture(scope="module")
def dpo_home(settings: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dpo_ran(tmp_path_factory.mktemp("dpo"), settings)


def without_dpo(dpo_home: Path, copy: Path) -> Path:
    shutil.copytree(dpo_home, copy, dirs_exist_ok=True)
    shutil.rmtree(copy / "cache" / "dpo")
    shutil.rmtree(copy / folder(dpo_home, "dpo").relative_to(dpo_home))
    return copy


def test_the_preference_is_learned_and_held_on_unseen_pairs_with_its_interval(dpo_home: Path) -> None:
    metrics = record(dpo_home, "dpo")["metrics"]
    check_names(metrics)
    assert metrics["dpo/eval_pairs"] == 6.0
    assert metrics["dpo/eval_accuracy"] >= metrics["dpo/eval_accuracy_low"] > 0.5
    assert metrics["dpo/chosen"] > metrics["dpo/rejected"]
    history = json.loads((folder(dpo_home, "dpo") / "history.json").read_text())
    assert [row["iteration"] for row in history] == list(range(1, 13))
    assert [row["iteration"] for row in history if "dpo/eval_loss" in row] == [4, 8, 12]
    assert history[-1]["dpo/eval_loss"] == metrics["dpo/eval_loss"] < 0.69
    assert repeated_points(dpo_home) == []


def test_it_starts_from_sft_reads_the_pairs_and_is_held_against_its_start(dpo_home: Path) -> None:
    assert record(dpo_home, "dpo")["ingredients"]["inputs"].keys() == {"sft", "prepare_preferences"}
    assert "| dpo - sft |" in comparison(dpo_home)
    assert weights(dpo_home, "dpo") != weights(dpo_home, "sft")
    assert (folder(dpo_home, "dpo") / "seal.json").is_file()
    assert list(dpo_home.glob("pages/*/dpo/*/loss.png"))


def test_it_is_compared_with_rl_that_started_from_the_same() -> None:
    both = open_preset(
        "retrain",
        ['stages.dpo={kind="dpo",init_from="sft",data=["preferences"],num_epochs=1,batch_size=4,learning_rate=1e-4}'],
    )
    assert {("dpo", "sft"), ("grpo", "sft")} <= set(contrasts(both))
    assert {("dpo", "grpo"), ("grpo", "dpo")} & set(contrasts(both))


@pytest.mark.slow
def test_an_adapter_is_merged_into_the_checkpoint_and_lies_beside_it(
    dpo_home: Path, settings: list[str], tmp_path: Path
) -> None:
    adapted = dpo_ran(without_dpo(dpo_home, tmp_path), settings, "stages.dpo.lora.rank=4")
    made = folder(adapted, "dpo") / "model"
    assert (made / "adapter" / "adapter_config.json").is_file()
    assert weights(adapted, "dpo") != weights(dpo_home, "sft")
    assert record(adapted, "dpo")["metrics"]["dpo/eval_accuracy_low"] > 0.5


@pytest.mark.slow
def test_killed_on_the_way_the_next_run_ends_with_the_same_bytes(
    dpo_home: Path, settings: list[str], tmp_path: Path
) -> None:
    copy = without_dpo(dpo_home, tmp_path)
    command = [sys.executable, "-m", "rlcore.flows", *arguments("run", DPO, *settings)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(copy), cwd=ROOT
    ) as first:
        wait_for_line(first, "dpo: step 3/12")
        first.send_signal(signal.SIGKILL)
    assert not list((copy / "cache").glob("dpo/*.json"))
    assert weights(dpo_ran(copy, settings), "dpo") == weights(dpo_home, "dpo")


@pytest.mark.scale
def test_on_two_ranks_it_learns_what_one_process_does(dpo_home: Path, settings: list[str], tmp_path: Path) -> None:
    copy = without_dpo(dpo_home, tmp_path)
    dpo_ran(copy, settings, "distributed.backend=processes", "distributed.learner_ranks=2")  # SFT too
    losses = [
        [row["dpo/loss"] for row in json.loads((folder(each, "dpo") / "history.json").read_text())]
        for each in (dpo_home, copy)
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-2, abs=1e-4)
    assert record(copy, "dpo")["metrics"]["dpo/eval_accuracy_low"] > 0.5


ANCHORED = """
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


def write_pairs(path: Path, first: int, count: int, *, chosen: str, rejected: str) -> None:
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


def test_labels_that_are_all_swapped_cannot_pass_where_winners_are_known(tmp_path: Path) -> None:
    (tmp_path / "anchored.toml").write_text(ANCHORED, encoding="utf-8")
    write_pairs(tmp_path / "pairs.jsonl", 0, 64, chosen="no", rejected="yes")
    write_pairs(tmp_path / "known.jsonl", 64, 24, chosen="yes", rejected="no")
    done = run_warm(arguments("run", tmp_path / "anchored.toml", *MICRO), environment(tmp_path), ROOT)
    assert done.returncode == 1
    assert "accuracy on gold pairs is 0.00 [0.00, 0.14]: the reward model prefers the losers" in done.stderr
    assert "they look swapped" in done.stderr


WIN_RATE = (*(each for each in TINY if not each.startswith("stages.ppo.")), "stages.win_rate.max_unjudged=0.1")
WIN_RATE = (*WIN_RATE, "stages.win_rate.num_prompts=8", "stages.win_rate.num_human_pairs=8")


def judged(home: Path, *overrides: str) -> Path:
    ran(home, "win_rate", *WIN_RATE, *overrides)
    return home


def account(home: Path) -> dict[str, Any]:
    paths = sorted(home.glob("artifacts/win_rate/*/win_rate.json"), key=lambda path: path.stat().st_mtime)
    found: dict[str, Any] = json.loads(paths[-1].read_text())
    return found


@pytest.fixture(scope="module")
def judged_home(micro_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = without(micro_home, tmp_path_factory.mktemp("win_rate") / "home", "ppo", "evaluate_ppo", "compare")
    for each in ("pages", "reports"):
        shutil.rmtree(home / each)
    return judged(home)


def test_a_reward_model_judges_and_is_audited_and_the_pages_say_so(judged_home: Path) -> None:
    assert list((judged_home / "work").iterdir()) == []  # nothing of the work is left
    metrics = record(judged_home, "win_rate")["metrics"]
    check_names(metrics)
    assert metrics["win_rate/prompts"] == 8.0
    assert metrics["win_rate/order_flip_rate"] == metrics["judge/order_flip_rate"] == 0.0
    assert metrics["judge/pairs"] == 8.0
    assert metrics["win_rate/rate_low"] <= metrics["win_rate/rate"] <= metrics["win_rate/rate_high"]
    found = account(judged_home)
    assert (found["policy"], found["reference"], found["judge"]) == ("grpo", "sft", "reward_model reward_model")
    assert metrics["win_rate/trusted"] == float(not found["distrust"])
    assert "## win_rate: win rate" in comparison(judged_home)
    (page,) = judged_home.glob("pages/*/win_rate/*/win_rate.md")
    assert "held-out human pairs" in page.read_text()
    (report,) = judged_home.glob("reports/*/report.html")
    assert "Win rates" in report.read_text()


def test_every_verdict_is_kept_beside_its_answers_and_equal_answers_are_half(judged_home: Path) -> None:
    table = read_table(folder(judged_home, "win_rate") / "verdicts.parquet")
    assert len(table) == 8
    same = table["first"] == table["second"]
    assert set(table["forward"][same]) <= {0.5}
    assert table["asked"].tolist() == (~same).tolist()


def test_the_graph_knows_both_sides_the_judge_and_its_pairs() -> None:
    config = open_preset("win_rate")
    (stage,) = (each for each in stages(config) if each.name == "win_rate")
    assert set(stage.inputs) == {"grpo", "prepare_prompts", "prepare_preferences", "reward_model", "sft"}
    assert "win_rate" not in checkpoints(config)
    assert "preferences" in required_by(config, ["win_rate"])[1]
    other = open_preset("win_rate", ["stages.win_rate.baseline=models:/mine@champion"])
    (stage,) = (each for each in stages(other) if each.name == "win_rate")
    assert "reference_win_rate" in stage.inputs
