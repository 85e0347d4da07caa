"""Multi-stage reasoning on a micro run: structure, lineage, counts, contracts, and rejection sampling under a kill."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from rlcore.flows.presets import open_preset
from rlcore.flows.stages import stages
from rlcore.tasks.steps.rows import read_demonstrations, read_prompts
from rlcore.tasks.store.storage import read_table
from tests.flows.conftest import ROOT, arguments, environment, ran, states_of
from tests.flows.homes import folder, kill_when, record, without
from tests.flows.micro import MICRO
from tests.flows.warm import run_warm

OVERRIDES = (
    *(setting for setting in MICRO if not setting.startswith("stages.ppo.")),
    "evaluation.confidence=0.9",
    "stages.rejection.num_prompts=160",
    "stages.rejection.num_samples=4",
    "stages.rejection.num_eval=4",
    "stages.sft_kept.num_steps=20",
    "stages.grpo_mixed.num_iterations=2",
    "stages.grpo_mixed.prompts_per_iteration=4",
    "stages.grpo_mixed.group_size=4",
    "stages.grpo_mixed.eval_every=0",
)
CHAIN = ("import_sft", "sft", "grpo", "rejection", "sft_kept", "grpo_mixed")


@pytest.fixture(scope="module")
def home(micro_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    evaluated = (f"evaluate_{name}" for name in ("base", "sft", "grpo", "ppo"))
    made = without(micro_home, tmp_path_factory.mktemp("reasoning") / "home", "prepare_prompts", "ppo", *evaluated)
    shutil.rmtree(made / "cache" / "compare")
    shutil.rmtree(made / "reports")
    ran(made, "reasoning", *OVERRIDES)
    return made


def test_each_stage_takes_the_artifact_of_the_one_before_it(home: Path) -> None:
    digests = {stage: record(home, stage)["ref"]["sha256"] for stage in CHAIN}
    inputs = {stage: record(home, stage)["ingredients"]["inputs"] for stage in CHAIN}
    assert inputs["grpo"]["sft"] == digests["sft"]
    assert inputs["rejection"]["grpo"] == digests["grpo"]
    assert inputs["sft_kept"] == {"import_sft": digests["import_sft"], "rejection": digests["rejection"]}
    assert inputs["grpo_mixed"]["sft_kept"] == digests["sft_kept"]
    assert "reward_model" in inputs["grpo_mixed"]
    assert "reward_model" not in inputs["rejection"]
    assert not list((home / "cache" / "ppo").glob("*.json"))


def test_there_is_an_evaluation_after_every_stage_and_all_checkpoints_are_compared(home: Path) -> None:
    (path,) = home.glob("pages/reasoning/compare/*/comparison.md")
    page = path.read_text()
    for label in ("base", "sft", "grpo", "sft_kept", "grpo_mixed"):
        assert f"| {label} | " in page
    for contrast in ("grpo - sft", "sft_kept - grpo", "grpo_mixed - sft_kept"):
        assert f"| {contrast} | " in page
    assert "## rejection: rejection sampling" in page
    for name in ("base", "sft", "grpo", "sft_kept", "grpo_mixed"):
        summary = json.loads((folder(home, f"evaluate_{name}") / "summary.json").read_text())
        assert summary["eval/accuracy_low"] <= summary["eval/accuracy"] <= summary["eval/accuracy_high"]
        assert summary["eval/problems"] == 40


def test_the_account_of_rejection_sampling_adds_up_and_its_rows_passed_the_contract(home: Path) -> None:
    made = folder(home, "rejection")
    account = json.loads((made / "rejection.json").read_text())
    report = json.loads((made / "report.json").read_text())
    total = account["all"]
    assert total["num_prompts"] == 160
    assert total["sampled"] == 160 * 4 == total["kept"] + sum(account["dropped"].values())
    assert total["verified"] >= total["kept"] >= 2
    assert total["pass_rate"]["low"] <= total["pass_rate"]["mean"] <= total["pass_rate"]["high"]
    assert account["tasks"]["arithmetic"] == total
    assert report["passed"]
    assert report["contract"] == "demonstrations/v1"
    assert report["accepted"] + report["quarantined"] == total["kept"]
    assert record(home, "rejection")["ref"]["rows"] == report["num_train"] + report["num_eval"] <= report["accepted"]
    assert str(home) not in (made / "report.json").read_text()  # the same bytes on every machine


def test_every_kept_answer_was_sampled_is_right_and_answers_a_training_prompt(home: Path) -> None:
    made, prompts = folder(home, "rejection"), folder(home, "prepare_prompts")
    sampled = {
        (row["prompt_id"], row["sample_index"]): row
        for path in sorted((made / "rollouts").glob("chunk-*.parquet"))
        for row in read_table(path).to_dict("records")
    }
    train = {row.prompt_id: row for row in read_prompts(prompts / "train.parquet")}
    rows = [row for split in ("train", "eval") for row in read_demonstrations(made / f"{split}.parquet")]
    assert len(rows) == record(home, "rejection")["ref"]["rows"]
    assert len(list((made / "rollouts").iterdir())) == 3  # 160 prompts in chunks of 64
    for row in rows:
        prompt_id, _, index = row.demonstration_id.rpartition("/")
        source = sampled[prompt_id, int(index)]
        assert source["text"] == row.completion
        assert source["value"] == 1.0
        assert source["finish_reason"] == "stop"
        assert row.messages == train[prompt_id].messages
    shown = {row.messages for row in rows}
    assert len(shown) == len(rows)  # one answer per prompt
    assert not shown & {row.messages for row in read_prompts(prompts / "eval.parquet")}


def test_the_second_rl_run_is_paid_by_all_three_rewards(home: Path) -> None:
    history = json.loads((folder(home, "grpo_mixed") / "history.json").read_text())
    assert len(history) == 2
    assert {name for name in history[0] if name.startswith("reward/term/")} >= {
        "reward/term/math",
        "reward/term/reward_model",
        "reward/term/format",
    }


def test_a_finished_flow_is_cached_and_sft_may_start_from_the_policy_instead(home: Path) -> None:
    def states(*overrides: str) -> dict[str, str]:
        done = run_warm(arguments("plan", "reasoning", *OVERRIDES, *overrides), environment(home), ROOT)
        assert done.returncode == 0, done.stderr
        return states_of(done.stdout)

    assert set(states().values()) == {"cached"}
    changed = {name for name, state in states("stages.sft_kept.init_from=grpo").items() if state != "cached"}
    assert changed == {"sft_kept", "evaluate_sft_kept", "grpo_mixed", "evaluate_grpo_mixed", "compare"}
    config = open_preset("reasoning", ["stages.sft_kept.init_from=grpo"])
    assert next(stage for stage in stages(config) if stage.name == "sft_kept").inputs == ("grpo", "rejection")


@pytest.mark.slow
def test_rejection_sampling_that_is_killed_goes_on_and_ends_with_the_same_bytes(home: Path, tmp_path: Path) -> None:
    code = f"from rlcore.flows.run import run_targets; run_targets('reasoning', {OVERRIDES!r}, ['rejection'])"
    copy = tmp_path / "home"
    shutil.copytree(home, copy)
    shutil.rmtree(copy / "cache" / "rejection")
    shutil.rmtree(copy / "artifacts" / "dataset" / str(record(home, "rejection")["ref"]["sha256"]))
    kill_when(copy, "work/*/chunks-digests/chunk-00000.parquet", [sys.executable, "-c", code])
    assert not list((copy / "cache" / "rejection").glob("*.json"))
    (first,) = copy.glob("work/*/chunks/chunk-00000.parquet")
    written = first.stat().st_mtime_ns

    resumed = ran(copy, "reasoning", *OVERRIDES)
    assert "resume: 1 of 3 chunks are complete" in resumed.stderr
    assert record(copy, "rejection")["ref"]["sha256"] == record(home, "rejection")["ref"]["sha256"]
    kept = folder(copy, "rejection") / "rollouts" / "chunk-00000.parquet"
    assert kept.stat().st_mtime_ns >= written  # copied from the work folder, never sampled again: see the bytes above


def test_every_page_says_the_level_of_its_intervals_that_the_preset_asks_for(home: Path) -> None:
    for pattern in ("pages/reasoning/compare/*/comparison.md", "pages/reasoning/rejection/*/rejection.md"):
        (page,) = home.glob(pattern)
        assert "90 %" in page.read_text()
    (report,) = home.glob("reports/*/report.html")
    assert "90 %" in report.read_text()  # and which cached stages have another level
