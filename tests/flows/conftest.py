"""The micro run that several tests look at: made once, inline, in a process of its own as a user would."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from tests.flows.micro import MICRO
from tests.flows.warm import run_warm

ROOT = Path(__file__).resolve().parents[2]


def run_flows(command: str, home: Path, *overrides: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """``python -m rlcore.flows <command>`` on the micro run with the inline engine; the code is that of ``cwd``."""
    if cwd == ROOT:
        return run_warm(flows_arguments(command, *overrides), environment(home), cwd)
    started = flows_command(command, *overrides)
    return subprocess.run(started, capture_output=True, text=True, env=environment(home), cwd=cwd, check=False)


def flows_command(command: str, *overrides: str) -> list[str]:
    return [sys.executable, "-m", "rlcore.flows", *flows_arguments(command, *overrides)]


def flows_arguments(command: str, *overrides: str) -> list[str]:
    return arguments(command, "tiny", *MICRO, *overrides)


def arguments(command: str, preset: str | Path, *overrides: str) -> list[str]:
    return [command, "--preset", str(preset), *(part for override in overrides for part in ("--set", override))]


def ran(home: Path, preset: str | Path, *overrides: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    done = run_warm(arguments("run", preset, *overrides), environment(home), cwd)
    assert done.returncode == 0, done.stderr
    return done


def states_of(plan: str) -> dict[str, str]:
    """Return the state of each stage that ``plan`` prints; other lines end their first word with a colon."""
    lines = [line.split() for line in plan.strip().splitlines()]
    return {words[0]: words[1] for words in lines if not words[0].endswith(":")}


def environment(home: Path) -> dict[str, str]:
    """Variables of a user's process, without those that a library sets when it is imported (scikit-learn: KMP_)."""
    others = ("PREFECT_", "MLFLOW_", "RLCORE_", "KMP_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    return kept | {"RLCORE_HOME": str(home), "RLCORE_ENGINE": "inline", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="session")
def micro_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The state folder of a finished micro run, which each worker has a copy of."""
    home, own = tmp_path_factory.mktemp("micro"), tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    with FileLock(shared / "micro.lock"):
        made = shared / "micro-made"
        if not (made / "done").exists():
            done = run_flows("run", made)
            assert done.returncode == 0, done.stderr
            (made / "done").touch()
    shutil.copytree(made, home, dirs_exist_ok=True, ignore=shutil.ignore_patterns("done"))
    return home
