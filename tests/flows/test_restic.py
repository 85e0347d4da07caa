"""A home that is backed up while a run is active, and lost: restored elsewhere, its versions are the same."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.flows.conftest import ROOT, environment, flows_arguments, flows_command, states_of
from tests.flows.warm import run_warm
from tests.restic import page
from tests.waiting import LONG, until

MODEL = "tiny-grpo/1"
pytestmark = pytest.mark.slow


def test_a_backup_during_a_run_is_whole_and_a_flipped_bit_is_found(micro_home: Path, tmp_path: Path) -> None:
    home, other = tmp_path / "home", tmp_path / "elsewhere" / "home"
    shutil.copytree(micro_home, home)
    (tmp_path / "user").mkdir()
    commands = page(tmp_path / "user", environment(home))
    commands.begin(home)
    before = set(home.glob("cache/*/*.json"))
    run = subprocess.Popen(
        flows_command("run", "seed=7"), env=environment(home), cwd=ROOT, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        until(lambda: run.poll() is not None or set(home.glob("cache/*/*.json")) - before, "a result of the run")
        commands.back_up(home)
        assert run.poll() is None, "the run has ended before the backup"
    finally:
        run.kill()
        run.wait(LONG)
    home.rename(tmp_path / "lost")
    restored = commands.restore(other)
    assert f"restored {other / 'mlflow.db'} from {other / 'dumps'}" in restored
    env = environment(other)
    planned = run_warm(flows_arguments("plan"), env, ROOT)
    assert set(states_of(planned.stdout).values()) == {"cached"}, planned.stdout + planned.stderr
    assert run_warm(["audit", "verify"], env, ROOT).returncode == 0
    done = run_warm(["reproduce", MODEL], env, ROOT)
    assert "every file of the model is the same" in done.stdout, done.stdout + done.stderr
    commands.back_up(other)  # the restored home goes on
    commands.flip_bit()
    with pytest.raises(AssertionError, match=r"Fatal: repository contains errors"):
        commands.check(other)
