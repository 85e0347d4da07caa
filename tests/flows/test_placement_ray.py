"""Runs on a Ray cluster: one to which nothing happens, and one with rollouts ahead, which is killed part by part.

tests/integration/test_services_ray.py kills runs of a deployment.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tests.flows.conftest import ROOT, environment
from tests.flows.homes import folder, weights, without
from tests.flows.micro import MICRO
from tests.flows.test_placement import assert_learns_alike
from tests.flows.test_rollouts_ahead import AHEAD

pytestmark = [pytest.mark.scale, pytest.mark.filterwarnings("default")]  # Ray's own are not ours to mend

ON_RAY = (
    "distributed.backend=ray",
    "distributed.learner_ranks=2",
    "distributed.ray.num_rollout_workers=2",
    "distributed.ray.num_reward_workers=1",
)
ITERATIONS = 6
RUN_AHEAD = (AHEAD, f"stages.grpo.num_iterations={ITERATIONS}")
SECONDS = 3600.0
NICENESS = {"RAY_worker_niceness": "0"}  # 15 otherwise: of a machine that has other work they would get nothing


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A cluster of this machine, which outlives the runs on it."""
    ray = pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in NICENESS.items():
            patch.setenv(name, value)
        found = ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False)
        yield str(found.address_info["gcs_address"])
        ray.shutdown()


@pytest.fixture(scope="module")
def undisturbed(micro_home: Path, tmp_path_factory: pytest.TempPathFactory, address: str) -> Path:
    """The home of a run on the cluster to which nothing happened: SFT, a reward model and PPO."""
    home = without(micro_home, tmp_path_factory.mktemp("placed") / "home", "sft", "reward_model", "grpo", "ppo")
    end(begin(home, address, "ppo"))
    return home


@pytest.fixture(scope="module")
def ahead(undisturbed: Path, tmp_path_factory: pytest.TempPathFactory, address: str) -> Path:
    """That home after a run of GRPO with rollouts one iteration ahead, to which nothing happened either."""
    home = without(undisturbed, tmp_path_factory.mktemp("ahead") / "home")
    end(begin(home, address, "grpo", *RUN_AHEAD))
    return home


def begin(home: Path, address: str, target: str, *settings: str) -> subprocess.Popen[bytes]:
    overrides = (*MICRO, *ON_RAY, *settings)
    code = f"from rlcore.flows.run import run_targets; run_targets('tiny', {overrides!r}, ({target!r},))"
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env=environment(home) | NICENESS | {"RAY_ADDRESS": address},
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def end(process: subprocess.Popen[bytes]) -> str:
    """Return the output of a run that must succeed."""
    _, said = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, said.decode()[-3000:]
    return said.decode()


def descendants(parent: int) -> dict[int, str]:
    """Return all descendants of a process with their command lines."""
    parents, commands = dict[int, int](), dict[int, str]()
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit():
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                commands[int(entry.name)] = (entry / "cmdline").read_text()
        except OSError:
            continue
    found = {parent}
    while more := {child for child, of in parents.items() if of in found} - found:
        found |= more
    return {each: commands.get(each, "") for each in found - {parent}}


def actors(kind: str = "") -> set[int]:
    """The processes of the shared cluster that are ranks, samplers and scorers, or but one kind of them."""
    kinds = (kind,) if kind else ("Rank", "Sampler", "Scorer")
    names = tuple(f"ray::{each}" for each in kinds)
    return {number for number, command in descendants(os.getpid()).items() if command.startswith(names)}


def until(is_so: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not is_so():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def tables(home: Path, stage: str) -> list[Path]:
    """Return the rollouts and samples of each iteration."""
    return sorted((folder(home, stage) / "rollouts").glob("*.parquet"))


def prompts_of(home: Path, stage: str) -> list[Counter[str]]:
    """Return the number of completions each prompt has, iteration by iteration."""
    return [Counter(pd.read_parquet(path)["prompt_id"]) for path in tables(home, stage)]


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


def test_a_run_on_a_cluster_goes_through_and_learns_as_one_process_does(undisturbed: Path, micro_home: Path) -> None:
    assert_learns_alike(undisturbed, micro_home, "ppo")  # with a reward model, on a scorer
    assert prompts_of(undisturbed, "ppo") == prompts_of(micro_home, "ppo")
    assert all(len(each) == 4 and set(each.values()) == {2} for each in prompts_of(undisturbed, "ppo"))
    until(lambda: not actors(), "a process outlives its run")


def test_each_token_is_one_update_old_and_kills_change_neither_prompts_nor_weights(
    ahead: Path, tmp_path: Path, address: str
) -> None:
    home = without(ahead, tmp_path / "home", "grpo")
    process = begin(home, address, "grpo", *RUN_AHEAD)
    until_step(process, home, 1)
    kill_one(process, "Sampler")
    until_step(process, home, 2)
    kill_one(process, "Rank")
    until_step(process, home, 4)
    process.kill()
    said = " ".join(process.communicate()[1].decode().split())
    assert "was replaced: reload policy_version" in said
    assert "is gone (The actor is dead because its worker process has died" in said
    until(lambda: not actors(), "a process outlives its run")
    assert not list((home / "cache" / "grpo").glob("*.json"))
    assert "resume: after iteration" in end(begin(home, address, "grpo", *RUN_AHEAD))

    rows = json.loads((folder(home, "grpo") / "history.json").read_text())
    assert [row["iteration"] for row in rows] == list(range(1, ITERATIONS + 1))
    assert [row["staleness"] for row in rows] == [0.0] + [1.0] * (ITERATIONS - 1)
    for number, path in enumerate(tables(home, "grpo"), start=1):  # a completion has the version of its oldest token
        assert set(pd.read_parquet(path)["policy_version"]) == {max(0, number - 2)}
    assert prompts_of(home, "grpo") == prompts_of(ahead, "grpo")
    assert all(len(each) == 4 and set(each.values()) == {4} for each in prompts_of(home, "grpo"))
    assert [path.read_bytes() for path in tables(home, "grpo")] == [path.read_bytes() for path in tables(ahead, "grpo")]
    assert weights(home, "grpo") == weights(ahead, "grpo")
    until(lambda: not actors(), "a process outlives its run")
