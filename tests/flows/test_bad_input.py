from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.flows.conftest import ROOT, environment, flows_command, run_flows, states_of

USAGE_ERROR, FAILURE = 2, 1
BEFORE_RL = ("import_sft", "prepare_prompts", "prepare_demonstrations", "sft", "prepare_preferences", "reward_model")


def refused(done: subprocess.CompletedProcess[str], *parts: str, code: int = FAILURE) -> None:
    """One error, at the end, that names these parts, and no traceback anywhere."""
    output = done.stdout + done.stderr
    assert done.returncode == code, output
    assert "Traceback" not in output
    assert output.count("\nerror (") == 1, output
    message = output[output.index("\nerror (") :]
    assert [part for part in parts if part not in message] == [], message
    assert "fix:" in message


@pytest.fixture
def home(micro_home: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(micro_home, tmp_path / "home"))


@pytest.fixture
def checkpoint(micro_home: Path, tmp_path: Path) -> Path:
    found = sorted((micro_home / "artifacts" / "checkpoint").glob("*/model"))
    return Path(shutil.copytree(found[0], tmp_path / "model"))


def from_folder(folder: Path) -> tuple[str, ...]:
    return ("model.source=folder", f"model.path={folder}")


def plan_of(home: Path, *overrides: str) -> Mapping[str, str]:
    return states_of(run_flows("plan", home, *overrides).stdout)


@pytest.mark.slow  # the hub's client tries again for a minute
def test_an_unknown_hub_model_is_named(tmp_path: Path) -> None:
    overrides = ("model.source=hub", "model.path=nobody/nothing", f"model.revision={'0' * 40}")
    refused(run_flows("run", tmp_path, *overrides), "nobody/nothing")


def test_a_corrupt_gguf_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + b"\x03\x00\x00\x00" + bytes(range(256)) * 4)
    refused(run_flows("run", tmp_path / "home", "model.source=gguf", f"model.path={path}"), str(path), code=USAGE_ERROR)


def test_corrupt_safetensors_are_named(tmp_path: Path, checkpoint: Path) -> None:
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    refused(run_flows("run", tmp_path / "home", *from_folder(checkpoint)), str(weights), code=USAGE_ERROR)


def test_a_loss_that_is_not_a_number_stops_the_run_and_what_was_finished_is_kept(home: Path) -> None:
    override = "stages.grpo.learning_rate=1e30"
    refused(run_flows("run", home, override), "learning rate")
    states = plan_of(home, override)
    assert {states[name] for name in BEFORE_RL} == {"cached"}
    assert states["grpo"] == "run"


def test_a_state_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = run_flows("run", tmp_path / "file" / "home")
    refused(done, f"{tmp_path / 'file'} is no folder", "RLCORE_HOME", code=2)


# A small file system that somebody else fills as soon as a path is there.
FULL_DISK = """
mount -t tmpfs -o size=64m tmpfs "$1" && cd "$1"
(until ls $2 > /dev/null; do sleep 0.02; done; cat /dev/zero > filled) 2> /dev/null &
filler=$!
shift 2 && cd "$1" && shift && "$@"
code=$?
kill $filler 2> /dev/null
exit $code
"""


def on_full_disk(folder: Path, after: str, command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run with ``folder`` on a small disk, which only this process sees; it is full when ``after`` is there."""
    wrapped = ["unshare", "--user", "--map-root-user", "--mount"]
    wrapped += ["sh", "-c", FULL_DISK, "sh", str(folder), after, str(ROOT)]
    return subprocess.run(
        [*wrapped, *command], capture_output=True, text=True, env=environment(folder / "home"), check=False
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "after", ["home/mlflow.db", "home/cache/import_sft", "home/cache/sft", "home/work/*/checkpoints"]
)
def test_a_full_disk_is_named_whatever_is_being_written(tmp_path: Path, after: str) -> None:
    if on_full_disk(tmp_path, "home", [sys.executable, "-c", ""]).returncode:
        pytest.skip("mounting a small file system in a user namespace is not allowed on this machine")
    refused(on_full_disk(tmp_path, after, flows_command("run")), "full", str(tmp_path))
