"""``rlcore show`` on a finished micro run: of the preset, of its model, and where there is nothing."""

from __future__ import annotations

import json
import re
import shlex
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

from rlcore.tasks.store.locks import file_lock
from tests.flows.conftest import ROOT, environment
from tests.flows.homes import without
from tests.flows.micro import MICRO
from tests.flows.warm import run_warm


def shown(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_warm(["show", *arguments], environment(home), ROOT)


def overrides(*others: str) -> list[str]:
    return [part for each in (*MICRO, *others) for part in ("--set", each)]


def test_a_preset_is_shown_with_its_stages_comparison_and_report(micro_home: Path) -> None:
    done = shown(micro_home, "tiny", *overrides())
    assert done.returncode == 0, done.stderr
    (record,) = (json.loads(path.read_text()) for path in (micro_home / "cache" / "grpo").glob("*.json"))
    assert f"grpo                    {record['seconds']:9.1f}  policy/{record['ref']['sha256'][:12]}" in done.stdout
    assert "| grpo" in done.stdout
    (report,) = [line.removeprefix("report").strip() for line in done.stdout.splitlines() if line.startswith("report ")]
    assert Path(report).is_file()
    assert "not run yet" not in done.stdout


def test_results_of_other_settings_are_named_with_what_differs_and_the_command_that_shows_them(
    micro_home: Path,
) -> None:
    done = shown(micro_home, "tiny", *overrides("stages.grpo.learning_rate=1e-5"))
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    (rate,) = (
        json.loads(text) for text in re.findall(r"  grpo: learning_rate changed \((\S+) -> 1e-05\)", done.stdout)
    )
    assert lines[-3] == "results of other settings, data or code:"
    (others,) = (line for line in lines if line.startswith("not run yet, or after a changed stage: "))
    assert "evaluate_grpo" in others and "prepare_prompts" not in others
    assert lines[-1].startswith("to show those: rlcore show tiny --set ")
    assert lines[-1].endswith(f" --set stages.grpo.learning_rate={rate}")
    again = shown(micro_home, *shlex.split(lines[-1].removeprefix("to show those: rlcore show ")))
    assert again.stdout == shown(micro_home, "tiny", *overrides()).stdout


def test_results_of_another_number_of_threads_are_shown_by_the_command_that_is_printed(micro_home: Path) -> None:
    done = shown(micro_home, "tiny", *overrides("hardware.num_threads=2"))
    command = done.stdout.splitlines()[-1]
    assert command.startswith("to show those: ") and command.endswith(" --set hardware.num_threads=1")


def test_results_of_another_state_of_the_whole_preset_are_named_as_such(micro_home: Path) -> None:
    done = shown(micro_home, "tiny", *overrides("model.shape.hidden_size=24", "seed=7"))
    assert done.returncode == 1
    assert f"no results in {micro_home} fit the preset\n" in done.stdout
    assert "  import_sft: model.shape.hidden_size changed (" in done.stdout and "-> 24); seed changed" in done.stdout
    again = shown(micro_home, *shlex.split(done.stdout.splitlines()[-1].removeprefix("to show those: rlcore show ")))
    assert again.stdout == shown(micro_home, "tiny", *overrides()).stdout


def test_a_copied_preset_is_planned_and_shown_without_the_settings_of_its_original(micro_home: Path) -> None:
    copied = overrides("name=copy", "stages.grpo.learning_rate=1e-5")
    rows = run_warm(["plan", "tiny", *copied], environment(micro_home), ROOT).stdout.splitlines()
    reasons = {words[0]: " ".join(words[1:]) for words in map(str.split, rows) if words}
    assert reasons["sft"] == "cached" and reasons["grpo"] == "run first run of this preset"
    assert "results of other settings" not in shown(micro_home, "tiny", *copied).stdout


def test_a_stage_that_runs_now_and_versions_with_their_aliases_are_named(micro_home: Path, tmp_path: Path) -> None:
    (key,) = (path.stem for path in (micro_home / "cache" / "grpo").glob("*.json"))
    home = without(micro_home, tmp_path / "home", "grpo")
    with closing(sqlite3.connect(home / "mlflow.db")) as database, database:
        alias = "INSERT INTO registered_model_aliases (name, alias, version) VALUES (?, ?, 1)"
        database.executemany(alias, [("tiny-sft", "champion"), ("tiny-grpo", "candidate")])
    (home / "work").mkdir()
    with file_lock(home / "work" / f"{key}.lock"):
        lines = shown(home, "tiny", *overrides()).stdout.splitlines()
    assert "running now             grpo" in lines
    assert "registered              tiny-ppo/1" in lines
    assert "registered              tiny-sft/1 (champion)" in lines
    awaits = "candidate, awaits rlcore approve tiny-grpo/1, of other settings, data or code"
    assert f"registered              tiny-grpo/1 ({awaits})" in lines


def test_where_nothing_was_run_there_is_nothing_to_show(tmp_path: Path) -> None:
    done = shown(tmp_path, "tiny")
    assert done.returncode == 1
    assert f"no results in {tmp_path}: nothing was run" in done.stdout
    assert "rlcore run tiny\n" in done.stdout


def test_a_model_is_shown_with_how_it_was_made_and_measured(micro_home: Path) -> None:
    done = shown(micro_home, "tiny-grpo/1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("tiny-grpo version 1\n")
    (files,) = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("  files:")]
    assert (Path(files) / "model.safetensors").is_file()
    assert "  reward/mean " in done.stdout


def test_a_model_that_is_not_there_is_one_error(micro_home: Path) -> None:
    done = shown(micro_home, "tiny-grpo@nobody")
    assert done.returncode == 1
    assert "there is no registered model 'tiny-grpo@nobody'" in done.stderr
