"""A run on a Ray cluster, as a user starts it. tests/integration/test_services_ray.py kills runs of a deployment."""

from __future__ import annotations

import os
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tests.flows.conftest import ROOT, environment, flows_command
from tests.flows.homes import folder
from tests.flows.test_placement import assert_learns_alike, before_learning

pytestmark = [pytest.mark.scale, pytest.mark.filterwarnings("default")]  # Ray's own are not ours to mend

ON_RAY = (
    "placement.backend=ray",
    "placement.learner_ranks=2",
    "placement.ray.samplers=2",
    "placement.ray.scorers=1",
)
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
    """The home of a run on the cluster to which nothing happened: SFT, a reward model, GRPO and PPO."""
    home = before_learning(micro_home, tmp_path_factory.mktemp("placed") / "home")
    end(begin(home, RAY_ADDRESS=address))
    return home


def begin(home: Path, **variables: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        flows_command("run", *ON_RAY),
        env=environment(home) | NICENESS | variables,
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def end(process: subprocess.Popen[bytes]) -> str:
    """What a run said that has to go through."""
    _, said = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, said.decode()[-3000:]
    return said.decode()


def descendants(parent: int) -> dict[int, str]:
    """What a process has started, and what that has, with its command lines."""
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


def tables(home: Path) -> list[Path]:
    """Of what was sampled and learned from, iteration by iteration."""
    return sorted((folder(home, "grpo") / "rollouts").glob("*.parquet"))


def prompts_of(home: Path) -> list[Counter[str]]:
    """How many completions each prompt has, iteration by iteration."""
    return [Counter(pd.read_parquet(path)["prompt_id"]) for path in tables(home)]


def test_a_run_on_a_cluster_goes_through_and_learns_as_one_process_does(undisturbed: Path, micro_home: Path) -> None:
    assert_learns_alike(undisturbed, micro_home)  # GRPO with a verifier, PPO with a reward model, on scorers
    assert prompts_of(undisturbed) == prompts_of(micro_home)
    assert all(len(each) == 4 and set(each.values()) == {4} for each in prompts_of(undisturbed))
    until(lambda: not actors(), "a process outlives its run")
