"""The whole pipeline on the micro run: results, cache, plan, kill and resume, and the committed curve."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from rlcore.tasks.steps.rows import read_pairs
from tests.flows.conftest import ROOT, environment, flows_command, run_flows, states_of
from tests.flows.homes import folder, kill_when, record, weights
from tests.flows.micro import MICRO
from tests.flows.warm import run_warm
from tests.flows.watched import CALL

GOLDEN = ROOT / "tests" / "golden" / "micro_curve.json"


def pages(home: Path, stage: str, file: str) -> str:
    """A page of the stage's only artifact."""
    (path,) = (home / "pages" / "tiny" / stage).glob(f"*/{file}")
    return path.read_text()


def plan_states(home: Path, *overrides: str, cwd: Path = ROOT) -> dict[str, str]:
    done = run_flows("plan", home, *overrides, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return states_of(done.stdout)


def test_every_stage_leaves_an_artifact_and_the_comparison_names_every_checkpoint(micro_home: Path) -> None:
    page = pages(micro_home, "compare", "comparison.md")
    assert all(f"| {label} |" in page for label in ("base", "sft", "grpo", "ppo"))
    assert (folder(micro_home, "grpo") / "model" / "model.safetensors").is_file()
    assert len(list((folder(micro_home, "grpo") / "rollouts").glob("*.parquet"))) == 4


def test_a_finished_run_is_cached_as_a_whole_and_a_changed_value_reruns_what_depends_on_it(micro_home: Path) -> None:
    assert set(plan_states(micro_home).values()) == {"cached"}
    changed = plan_states(micro_home, "stages.grpo.learning_rate=1e-5")
    assert changed["grpo"] == "run"
    assert {name for name, state in changed.items() if state != "cached"} == {"grpo", "evaluate_grpo", "compare"}


def test_a_damaged_artifact_is_noticed_and_made_again_with_the_same_content(micro_home: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    shutil.copytree(micro_home, home)
    weights = folder(home, "sft") / "model" / "model.safetensors"
    before = weights.read_bytes()
    weights.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    assert plan_states(home)["sft"] == "run"
    assert run_flows("run", home).returncode == 0
    assert weights.read_bytes() == before
    assert set(plan_states(home).values()) == {"cached"}


@pytest.mark.slow
def test_a_run_killed_in_rl_goes_on_from_its_checkpoint_and_ends_bit_for_bit_like_an_uninterrupted_one(
    micro_home: Path, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    kill_when(home, "work/*/checkpoints/step-000002", flows_command("run"))
    created = record(home, "sft")["created"]
    assert not list((home / "cache" / "grpo").glob("*.json"))

    done = run_flows("run", home)
    assert done.returncode == 0, done.stderr
    assert "resume: after iteration" in done.stderr
    assert record(home, "sft")["created"] == created
    for stage in ("grpo", "ppo"):
        assert weights(home, stage) == weights(micro_home, stage)
        assert len(json.loads((folder(home, stage) / "history.json").read_text())) == 4


def test_editing_a_helper_reruns_exactly_the_stages_that_reach_it(micro_home: Path, tmp_path: Path) -> None:
    copy = tmp_path / "code"
    shutil.copytree(ROOT / "rlcore", copy / "rlcore")
    shutil.copy(ROOT / "pyproject.toml", copy)
    helper = copy / "rlcore" / "training" / "sft.py"
    commented = copy / "rlcore" / "training" / "reward_fit.py"
    command = copy / "rlcore" / "flows" / "__main__.py"
    commented.write_text(commented.read_text() + "\n# a comment changes nothing\n")
    command.write_text(command.read_text() + "\nUNUSED = 1\n")  # no stage runs it
    helper.write_text(helper.read_text() + "\nUNUSED = 1\n")
    states = plan_states(micro_home, cwd=copy)
    assert {name for name, state in states.items() if state == "run"} == {"sft"}
    assert states["prepare_prompts"] == states["evaluate_base"] == "cached"


def test_without_preferences_the_policy_samples_pairs_and_the_verifier_judges_them(
    micro_home: Path, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    shutil.copytree(micro_home, home)
    overrides = (
        *MICRO,
        "data.preferences.adapter=policy",
        "data.preferences.policy=sft",
        "data.preferences.num_train=24",
        "data.preferences.num_eval=8",
    )
    arguments = [json.dumps(overrides), json.dumps(["prepare_preferences"]), str(tmp_path / "called.json")]
    done = run_warm(arguments, environment(home), ROOT, call=CALL)
    assert done.returncode == 0, done.stderr
    newest = max((home / "cache" / "prepare_preferences").glob("*.json"), key=lambda path: path.stat().st_mtime)
    pairs = read_pairs(home / json.loads(newest.read_text())["ref"]["uri"] / "train.parquet")
    assert len(pairs) > 4
    assert all(pair.source == "policy" and pair.chosen != pair.rejected for pair in pairs)
