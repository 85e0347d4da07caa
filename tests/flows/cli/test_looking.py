"""Commands that only look: they create nothing, and say where they looked."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rlcore.flows.cli.app import main

COMMANDS = (
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


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
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


@pytest.mark.parametrize("command", [("rollback", "tiny-grpo/1", "--reason", "worse"), ("reproduce", "tiny-grpo/1")])
def test_where_nothing_was_run_the_error_is_all_that_is_printed(unmade: Path, command: tuple[str, ...]) -> None:
    line = [sys.executable, "-m", "rlcore.flows", *command]
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
