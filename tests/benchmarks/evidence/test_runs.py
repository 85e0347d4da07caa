"""Runs of the evidence: an arm through its own entry point, and arms that are not run twice."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.evidence import __main__ as program
from benchmarks.evidence.claims import CLAIMS, read_plan, read_results
from benchmarks.evidence.runs import added, curve_of, figures, other_figures
from rlcore.errors import TrainingError
from rlcore.flows.presets import open_preset
from rlcore.flows.stages import stages
from tests.flows.conftest import ROOT, environment
from tests.flows.micro import MICRO
from tests.flows.warm import run_warm

ROW = {"rollouts/count": 8.0, "rollouts/tokens": 100.0, "seconds/processor": 2.0, "reward/mean": 0.5}


def test_a_curve_adds_up_costs_and_has_the_verifiers_score_where_another_reward_is_trained_on() -> None:
    by_model = ROW | {"reward/mean": 3.0, "reward/term/procedural": 0.25}
    curve = curve_of([ROW, by_model])
    assert (curve["completions"], curve["tokens"], curve["cpu_seconds"]) == ([8, 16], [100, 200], [2, 4])
    assert curve["score"] == [0.5, 0.25]
    wall = {f"seconds/{name}": 1.0 for name in ("rollout", "score", "update", "sync")}
    assert curve_of([ROW | wall] * 2, on_gpu=True)["cpu_seconds"] == [4.0, 8.0]


def test_costs_are_those_of_the_run_or_of_all_attempts_and_of_what_arms_share(tmp_path: Path) -> None:
    usage, shared = tmp_path / "usage.jsonl", tmp_path / "shared.jsonl"
    attempt = json.dumps({"cpu_seconds": 5.0, "completions": 3, "tokens": 7}) + "\n"
    usage.write_text(attempt * 2, encoding="utf-8")
    shared.write_text(attempt, encoding="utf-8")
    offline = figures(tmp_path, None, usage, [])
    assert (offline["cpu_seconds"], offline["completions"], offline["tokens"]) == (10, 6, 14)
    assert set(map(len, offline["curve"].values())) == {0}
    (tmp_path / "history.json").write_text(json.dumps([{"step": 1}, ROW]), encoding="utf-8")
    online = figures(tmp_path, None, usage, [shared])
    assert (online["cpu_seconds"], online["completions"], online["tokens"]) == (7, 11, 107)


def test_an_arm_pays_for_the_samples_that_it_trains_on_and_not_for_data_of_others() -> None:
    config = open_preset(program.TASKS["smollm2"].preset)
    inputs = {stage.name: stage.inputs for stage in stages(config)}
    found = {name: added(config, inputs[name], name) for name in ("sft", "grpo", "kept", "dpo", "reward_model")}
    assert found == {
        "sft": ("sft",),
        "grpo": ("grpo",),
        "kept": ("rejection", "kept"),
        "dpo": ("prepare_few_preferences", "dpo"),
        "reward_model": ("prepare_preferences", "reward_model"),
    }


def test_an_arm_of_a_preset_gives_its_figures(tmp_path: Path) -> None:
    keys = [f"{key} = {value}" for key, value in (each.split("=", 1) for each in MICRO) if "stages.ppo" not in key]
    preset = tmp_path / "arms.toml"
    head = 'extends = "tiny"\nname = "arms"\nwithout = ["stages.ppo"]\n'
    preset.write_text(head + "\n".join(keys) + "\n", encoding="utf-8")
    env = environment(tmp_path / "home")
    call = "benchmarks.evidence.runs:main"
    done = run_warm([str(preset), "0", "grpo"], env, ROOT, call=call)
    assert done.returncode == 0, done.stderr
    made: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    found, (unused,) = made["figures"], made["unused"]
    assert len(found["right"]) == 40
    assert (Path(unused) / "model").is_dir()
    assert found["curve"]["completions"] == [16, 32, 48, 64]
    assert found["completions"] == 64
    assert found["tokens"] == found["curve"]["tokens"][-1] > 64
    assert found["memory"]["total"] > 0 < found["cpu_seconds"]
    again = run_warm([str(preset), "0", "base"], env, ROOT, call=call)
    start = json.loads(again.stdout.splitlines()[-1])
    assert (start["figures"]["cpu_seconds"], start["unused"]) == (0, []), again.stderr


@pytest.mark.parametrize("task", ["smollm2", "tiny", "long", "qwen"])
def test_every_arm_of_the_plan_is_a_stage_of_its_task_and_none_is_run_twice(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    path = tmp_path / f"evidence-{task}-7.json"

    def fake(arguments: list[str], home: Path) -> dict[str, Any]:
        arm = arguments[2]
        if arm == "ppo" and ran.count("ppo") == 0:
            ran.append(arm)
            raise SystemExit("killed")
        ran.append(arm)
        folder = home / arm
        folder.mkdir(parents=True)
        assert arm not in json.loads(path.read_text())["arms"] if path.exists() else True
        return {"figures": {"right": "01"}, "unused": [str(folder)]}

    monkeypatch.setattr(program, "RESULTS", tmp_path)
    monkeypatch.setattr(program, "run_arm", fake)
    with pytest.raises(SystemExit, match="killed"):
        program.run_seed(task, 7, tmp_path / "home")
    program.run_seed(task, 7, tmp_path / "home")
    assert not (tmp_path / "home").exists()
    program.run_seed(task, 7, tmp_path / "home")
    assert [arm for arm in ran if ran.count(arm) > 1] == ["ppo", "ppo"]
    results, plan = read_results(tmp_path)[task], read_plan(CLAIMS)
    planned = (*plan.tasks, "qwen")
    contrasts = [each for claim in plan.claim for each in claim.contrast if task in (each.tasks or planned)]
    assert contrasts
    assert set(results) == set(ran) >= {arm for each in contrasts for arm in each.arms}


def test_a_figure_that_is_no_number_does_not_lose_the_arm(tmp_path: Path) -> None:
    (tmp_path / "metrics.json").write_text('{"rm/eval_accuracy": 0.5, "rm/gain_over_length": NaN}', encoding="utf-8")
    assert other_figures(tmp_path) == {"rm/eval_accuracy": 0.5}


def test_an_artifact_stays_until_the_figures_of_its_arm_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = tmp_path / "artifact"
    artifact.mkdir()
    unwritable = {"figures": {"right": float("nan")}, "unused": [str(artifact)]}
    monkeypatch.setattr(program, "RESULTS", tmp_path)
    monkeypatch.setattr(program, "run_arm", lambda *_: unwritable)
    with pytest.raises(ValueError, match="not JSON compliant"):
        program.run_seed("tiny", 0, tmp_path / "home")
    assert artifact.is_dir()


def test_a_failed_arm_is_named_with_the_last_lines_of_its_log(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"grpo failed with code 1: .*no_such_preset") as raised:
        program.run_arm(["no_such_preset", "0", "grpo"], tmp_path)
    assert Path(raised.value.where).is_file()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--task", "tiny", "--arms", "gpro"], "--arms: tiny has no gpro; there are base, dpo, grpo"),
        (["--task", "tiny", "--seeds", "99", "--home", "/proc/none"], "/proc/none"),
    ],
)
def test_a_wrong_option_is_refused_in_words(
    given: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["evidence", *given])
    assert program.main() == 1
    assert message in capsys.readouterr().err


def test_a_commit_is_marked_for_changed_code_and_not_for_the_results_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "ROOT", tmp_path)
    files = [tmp_path / name for name in ("code.py", "benchmarks/results/evidence-tiny-0.json")]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("0")
    author = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    for command in (["init", "-q"], ["add", "."], [*author, "commit", "-q", "--no-verify", "-m", "a"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    commit = program._commit()
    files[1].write_text("1")
    assert program._commit() == commit
    files[0].write_text("1")
    assert program._commit() == f"{commit}-dirty"
