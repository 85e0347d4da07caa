"""A run on a Ray cluster, as a user starts it: whole on one that is there; on its own, of which the head is killed."""

from __future__ import annotations

import json
import os
import signal
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
from tests.flows.test_placement import assert_learns_alike, home

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.scale, pytest.mark.filterwarnings("default")]  # Ray's own are not ours to mend
__all__ = ["home"]  # a fixture

ON_RAY = (
    "placement.backend=ray",
    "placement.learner_ranks=2",
    "placement.ray.samplers=2",
    "placement.ray.scorers=1",
)
ALONE = 'without=["stages.ppo"]'
SECONDS = 3600.0
NICENESS = {"RAY_worker_niceness": "0"}  # 15 otherwise: of a machine that has other work they would get nothing


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A cluster of this machine, which outlives the stages of a run."""
    for name, value in NICENESS.items():
        monkeypatch.setenv(name, value)
    found = ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False)
    yield str(found.address_info["gcs_address"])
    ray.shutdown()


def begin(home: Path, *overrides: str, **variables: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        flows_command("run", *ON_RAY, *overrides),
        # Without its head a driver ends after a minute, elsewhere.
        env=environment(home) | NICENESS | {"RAY_gcs_rpc_server_reconnect_timeout_s": "5"} | variables,
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


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


def until(is_so: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not is_so():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def prompts_of(home: Path) -> Iterator[tuple[tuple[str, int], ...]]:
    """How many completions each prompt has, iteration by iteration."""
    for path in sorted((folder(home, "grpo") / "rollouts").glob("*.parquet")):
        yield tuple(sorted(Counter(pd.read_parquet(path)["prompt_id"]).items()))


def test_a_run_on_a_cluster_goes_through_and_learns_as_one_process_does(
    home: Path, micro_home: Path, address: str
) -> None:
    process = begin(home, RAY_ADDRESS=address)  # GRPO with a verifier, PPO with a reward model, on scorers
    _, said = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, said.decode()[-3000:]
    assert_learns_alike(home, micro_home)
    assert len({*prompts_of(home)}) == len([*prompts_of(home)]) == 4
    assert [*prompts_of(home)] == [*prompts_of(micro_home)]


def test_a_run_whose_head_is_lost_ends_leaves_nothing_and_goes_on_when_it_is_started_again(
    home: Path, micro_home: Path
) -> None:
    process = begin(home, ALONE)
    until(lambda: process.poll() is not None or [*home.glob("work/*/checkpoints/step-000002")], "no checkpoint")
    left = descendants(process.pid)
    (head,) = [each for each, command in left.items() if "gcs_server" in command]
    os.kill(head, signal.SIGKILL)
    _, said = process.communicate(timeout=SECONDS)
    assert process.returncode not in (0, None), said.decode()[-3000:]
    until(lambda: not [each for each in left if Path(f"/proc/{each}").exists()], f"left: {left}")
    process = begin(home, ALONE)
    _, said = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, said.decode()[-3000:]
    assert "goes on after iteration" in said.decode()
    rows = json.loads((folder(home, "grpo") / "history.json").read_text())
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4]
    assert [*prompts_of(home)] == [*prompts_of(micro_home)]
