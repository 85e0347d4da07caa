"""Commands that compute nothing: they import no library, create nothing, and show what is there."""

from __future__ import annotations

import json
import re
import shlex
import sqlite3
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path

import pytest

from rlcore.flows.cli.app import main
from rlcore.flows.plan import RunPlan
from rlcore.flows.presets import open_preset
from rlcore.tasks.keys.plan import PlanRow
from rlcore.tasks.store.locks import file_lock
from tests.flows.conftest import ROOT, environment, flows_arguments, states_of
from tests.flows.homes import without
from tests.flows.micro import MICRO
from tests.flows.warm import run_warm

MEASURE = """
import json, sys
from rlcore.flows.cli.app import main
code = main()
heavy = {"torch", "transformers", "numpy", "pandas", "pyarrow", "pandera", "matplotlib", "prefect", "mlflow"}
print(json.dumps([code, sorted(heavy & sys.modules.keys())]))
"""


def run(home: Path, *arguments: str, **variables: str) -> tuple[str, list[str]]:
    command = [sys.executable, "-c", MEASURE, *arguments]
    variables = environment(home) | variables
    done = subprocess.run(command, capture_output=True, text=True, env=variables, cwd=ROOT, check=False)
    text, _, last = done.stdout.rstrip().rpartition("\n")
    code, imported = json.loads(last)
    assert code == 0, done.stderr
    return text, imported


def test_a_plan_of_cached_stages_imports_no_library(micro_home: Path) -> None:
    plan, imported = run(micro_home, *flows_arguments("plan"))
    assert set(states_of(plan).values()) == {"cached"}
    assert imported == []


def test_results_are_shown_without_a_library(micro_home: Path) -> None:
    shown, imported = run(micro_home, "show", "tiny", *flows_arguments("plan")[3:])
    assert "policy/" in shown
    assert imported == []


def test_a_run_of_cached_stages_starts_no_prefect_and_writes_its_report(micro_home: Path) -> None:
    before = set(micro_home.glob("reports/*/report.html"))
    output, imported = run(micro_home, *flows_arguments("run"), RLCORE_ENGINE="prefect")
    assert "prefect" not in imported
    assert (micro_home / "prefect" / "prefect.db").stat().st_size == 0  # made for its owner, and never used
    (report,) = set(micro_home.glob("reports/*/report.html")) - before
    assert str(report) in output
    assert "<title>tiny: run report</title>" in report.read_text()


@pytest.mark.parametrize(
    ("states", "variables", "expected"),
    [
        (("cached", "cached"), {}, "inline"),
        (("cached", "run"), {}, "prefect"),
        (("cached", "cached"), {"PREFECT_API_URL": "http://server/api"}, "prefect"),  # whose users see each run
        (("cached", "run"), {"RLCORE_ENGINE": "inline"}, "inline"),
    ],
)
def test_prefect_runs_what_is_computed_and_what_a_server_shows(
    states: tuple[str, ...],
    variables: dict[str, str],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = tuple(PlanRow(stage=f"stage_{state}", state=state, reason="") for state in states)  # type: ignore[arg-type]
    planned = RunPlan(config=open_preset("tiny"), rows=rows, lines=())
    for name, value in ({"RLCORE_HOME": str(tmp_path), "RLCORE_ENGINE": "", "PREFECT_API_URL": ""} | variables).items():
        monkeypatch.setenv(name, value)
    ran = []
    monkeypatch.setattr("rlcore.flows.plan.plan_run", lambda *_, **__: planned)
    monkeypatch.setattr("rlcore.flows.run.run_targets", lambda *_: ran.append("inline") or {})
    monkeypatch.setattr("rlcore.tasks.run.prefect_bridge.call_flow", lambda *_, **__: ran.append("prefect") or {})
    monkeypatch.setattr("rlcore.tasks.report.summary.summarise", lambda *_, **__: "")
    assert main(["run", "tiny"]) == 0
    assert ran == [expected]


LOOKING = (
    ("plan", "tiny"),
    ("show", "tiny"),
    ("show", "tiny-grpo/1"),
    ("lineage", "tiny-grpo@champion"),
    ("config", "tiny", "hardware"),
    ("doctor",),
    ("ui",),
    # that fail
    ("export", "tiny-grpo/1", "exported"),
    ("serve", "tiny-grpo/1"),
    ("reproduce", "tiny-grpo/1"),
    ("rollback", "tiny-grpo/1", "--reason", "worse"),
    ("approve", "tiny-grpo/1", "--reason", "better"),
    ("reject", "tiny-grpo/1", "--reason", "worse"),
    ("audit", "show"),
    ("audit", "verify"),
    ("lineage", "--rows", "request.jsonl"),
    *((command, "tiny", "--set", "seed=-1") for command in ("run", "promote", "retrain")),
    ("retrain", "tiny"),
)
OF_PRESETS = {"config", "run", "promote", "retrain"}  # they read the preset first


@pytest.fixture
def unmade(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state directory that does not exist, named by ``RLCORE_HOME``."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("RLCORE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.mark.parametrize("command", LOOKING, ids=" ".join)
def test_looking_and_failing_create_no_state_directory_and_name_the_one_that_was_searched(
    command: tuple[str, ...],
    unmade: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    main(command)
    shown = "".join(capsys.readouterr())
    assert list(tmp_path.iterdir()) == []
    assert (str(unmade) in shown) == (command[0] not in OF_PRESETS)


def test_where_nothing_was_run_the_error_is_all_that_is_printed(unmade: Path) -> None:
    line = [sys.executable, "-m", "rlcore.flows", "rollback", "tiny-grpo/1", "--reason", "worse"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("\nerror (") and str(unmade) in done.stderr


def test_where_nothing_was_run_a_preset_from_the_registry_is_one_error(
    unmade: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = ("--set", "model.source=registry", "--set", "model.path=models:/tiny-grpo@champion")
    assert main(["plan", "tiny", *source]) != 0
    assert list(tmp_path.iterdir()) == []
    assert "nothing was run here yet" in capsys.readouterr().err


@pytest.mark.parametrize("faulty", [False, True])
def test_a_check_of_data_keeps_rejected_rows_alone_and_not_in_the_folder(
    faulty: bool, unmade: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {
            "prompt_id": f"q{number}",
            "messages": [{"role": "user", "content": f"{number} + 1"}],
            "reference": str(number + 1),
            "task": "sums",
        }
        for number in range(40)
    ]
    rows[3] |= {"reference": 4} if faulty else {}
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    assert main(["validate", str(tmp_path / "rows.jsonl"), "--contract", "prompts"]) == int(faulty)
    assert not unmade.exists()
    assert {path.name for path in tmp_path.iterdir()} == {"rows.jsonl", "tmp"}
    shown = capsys.readouterr().out
    kept = [path for path in temporary.rglob("*") if path.is_file()]
    assert {path.name for path in kept} == ({"quarantine.jsonl", "report.json"} if faulty else set())
    assert all(str(path) in shown for path in kept if path.name == "quarantine.jsonl")


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
