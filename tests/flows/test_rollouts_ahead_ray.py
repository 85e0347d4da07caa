"""Rollouts one iteration ahead, from samplers on a Ray cluster, in a run that loses a sampler, a rank and its life."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from tests.flows.conftest import ROOT, environment
from tests.flows.homes import folder, weights
from tests.flows.micro import MICRO
from tests.flows.test_placement_ray import NICENESS, ON_RAY, actors, address, end, prompts_of, tables, until
from tests.flows.test_rollouts_ahead import AHEAD

pytestmark = [pytest.mark.scale, pytest.mark.filterwarnings("default")]  # Ray's own are not ours to mend
__all__ = ["address"]  # a fixture

ITERATIONS = 8
SETTINGS = (*MICRO, *ON_RAY, AHEAD, f"stages.grpo.num_iterations={ITERATIONS}")


def begin(home: Path, address: str) -> subprocess.Popen[bytes]:
    code = f"from flows.run import run_targets; run_targets('tiny', {SETTINGS!r}, ('grpo',))"
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env=environment(home) | NICENESS | {"RAY_ADDRESS": address},
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, address: str) -> Path:
    """The home of a run to which nothing happened."""
    home = tmp_path_factory.mktemp("ahead") / "home"
    end(begin(home, address))
    return home


def until_step(process: subprocess.Popen[bytes], home: Path, step: int) -> None:
    """Return when a run has a checkpoint of that iteration, or of a later one."""

    def has_one() -> bool:
        found = home.glob("work/*/checkpoints/step-??????")
        return process.poll() is not None or any(int(path.name[5:]) >= step for path in found)

    until(has_one, f"no checkpoint {step}")
    assert process.poll() is None, process.communicate()[1].decode()[-3000:]


def kill_one(process: subprocess.Popen[bytes], kind: str) -> None:
    """Kill a process of the cluster, and return when another stands in its place."""
    before = actors(kind)
    os.kill(max(before), signal.SIGKILL)
    until(lambda: process.poll() is not None or len(actors(kind) - before) > 0, f"no {kind} in its place")
    assert process.poll() is None, process.communicate()[1].decode()[-3000:]


def test_each_token_is_one_update_old_and_kills_change_neither_prompts_nor_weights(
    undisturbed: Path, tmp_path: Path, address: str
) -> None:
    home = tmp_path / "home"
    shutil.copytree(undisturbed, home)
    shutil.rmtree(home / "cache" / "grpo")
    shutil.rmtree(home / "work", ignore_errors=True)
    process = begin(home, address)
    until_step(process, home, 1)
    kill_one(process, "Sampler")
    until_step(process, home, 3)
    kill_one(process, "Rank")
    until_step(process, home, 5)
    process.kill()
    said = " ".join(process.communicate()[1].decode().split())
    assert "was replaced: it gets version" in said
    assert "is gone (The actor is dead because its worker process has died" in said
    until(lambda: not actors(), "a process outlives its run")
    assert not (home / "cache" / "grpo").exists()
    assert "goes on after iteration" in end(begin(home, address))

    rows = json.loads((folder(home, "grpo") / "history.json").read_text())
    assert [row["iteration"] for row in rows] == list(range(1, ITERATIONS + 1))
    assert [row["staleness"] for row in rows] == [0.0] + [1.0] * (ITERATIONS - 1)
    for number, path in enumerate(tables(home), start=1):  # a completion has the version of its oldest token
        assert set(pd.read_parquet(path)["policy_version"]) == {max(0, number - 2)}
    assert prompts_of(home) == prompts_of(undisturbed)
    assert all(len(each) == 4 and set(each.values()) == {4} for each in prompts_of(home))
    assert [path.read_bytes() for path in tables(home)] == [path.read_bytes() for path in tables(undisturbed)]
    assert weights(home, "grpo") == weights(undisturbed, "grpo")
    until(lambda: not actors(), "a process outlives its run")
