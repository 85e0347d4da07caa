"""Two ranks on a Ray cluster and two real vLLM servers beside them, as a user starts it: whole, and with one killed.

`make test-scale-engine` runs it; the interpreter of the engine's environment is in ENGINE_PYTHON.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tests.flows.conftest import ROOT, environment
from tests.flows.homes import folder
from tests.flows.micro import MICRO
from tests.flows.test_placement_ray import NICENESS, descendants, until
from tests.integration import vllm_runs

pytestmark = [
    pytest.mark.scale,
    pytest.mark.engine,
    pytest.mark.skipif(not vllm_runs.PYTHON, reason="ENGINE_PYTHON names no interpreter: `make test-scale-engine`"),
]

ITERATIONS, PROMPTS, GROUP = 5, 8, 4
PLACED = (
    "placement.backend=ray",
    "placement.learner_ranks=2",
    "stages.grpo.sampling.engine.kind=vllm",
    f"stages.grpo.sampling.engine.python={vllm_runs.PYTHON}",
    "stages.grpo.sampling.engine.replicas=2",
    "stages.grpo.sampling.engine.kv_cache_gib=0.25",
)
# The share of even token ids: a policy learns that within a few iterations, whatever it knew.
LEARNABLE = (
    "hardware.dtype=float32",
    "stages.grpo.rewards=[{kind='tests.rlcore.cluster.scoring:even',weight=1.0}]",
    "stages.grpo.learning_rate=0.005",
    "health.kl.warn=100.0",  # it goes far, and may
    "health.kl.stop=1000.0",
    "stages.grpo.eval_every=100",
    f"stages.grpo.num_iterations={ITERATIONS}",
    f"stages.grpo.prompts_per_iteration={PROMPTS}",
    f"stages.grpo.group_size={GROUP}",
)
SERVER, PORT = "vllm.entrypoints.openai.api_server", re.compile(r"--port\0(\d+)")
MEMORY = re.compile(r"/dev/shm/[^\s(]+")


@dataclass
class Left:
    """What a run could leave behind beside its home: processes, what they share in memory, folders, ports."""

    home: Path
    processes: set[int] = field(default_factory=set)
    paths: set[Path] = field(default_factory=set)
    ports: set[int] = field(default_factory=set)
    meetings: set[Path] = field(default_factory=set)  # files where a server's processes met

    def note(self, run: int) -> set[int]:
        """Look at what is there now; returns the first process of each server."""
        found = descendants(run)
        self.processes |= found.keys()
        for each in found:
            try:
                self.paths |= {Path(path) for path in MEMORY.findall(Path(f"/proc/{each}/maps").read_text())}
            except OSError:  # it has ended
                continue
        guards = [command.split("\0") for command in found.values() if "/vllm/guard.py\0" in command]
        folders = {Path(path) for words in guards for path in words[4].split(os.pathsep)}
        self.paths = {path for path in self.paths | folders if not path.is_relative_to(self.home)}
        self.meetings |= {path for each in folders for path in each.glob("vllm_dist_*")}
        servers = {number: command for number, command in found.items() if SERVER in command}
        self.ports |= {int(port) for command in servers.values() for port in PORT.findall(command)}
        return {number for number, command in servers.items() if "/vllm/guard.py\0" not in command}

    def assert_nothing(self) -> None:
        until(lambda: not [each for each in self.processes if Path(f"/proc/{each}").exists()], "a process is left")
        assert not [path for path in self.paths | self.meetings if path.exists()]
        for port in self.ports:
            with socket.socket() as probe:
                assert probe.connect_ex(("127.0.0.1", port)), f"somebody listens on {port}"


@dataclass(frozen=True)
class Run:
    home: Path
    said: str
    left: Left


def run(home: Path, *, ahead: int = 0, watch: Callable[[set[int], Path], Any] = lambda servers, home: None) -> Run:
    """A run until its end; ``watch`` is shown its servers all the time, and may kill one."""
    settings = (*MICRO, *PLACED, *LEARNABLE, f"stages.grpo.sampling.staleness={ahead}")
    code = f"from flows.run import run_targets; run_targets('tiny', {settings!r}, ('grpo',))"
    left, log = Left(home), home.with_suffix(".log")
    with log.open("wb") as written:
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            env=environment(home) | NICENESS | {"VLLM_CPU_OMP_THREADS_BIND": "nobind"},
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=written,
        )
    while process.poll() is None:
        watch(left.note(process.pid), home)
        time.sleep(0.5)
    said = log.read_text()
    vllm_runs.say(said[-6000:])
    assert process.returncode == 0
    return Run(home, said, left)


def steps(home: Path) -> int:
    """Of which a run has, or had, checkpoints."""
    found = [int(path.name.removeprefix("step-")) for path in home.glob("work/*/checkpoints/step-??????")]
    return max(found, default=0)


def tables(home: Path) -> list[pd.DataFrame]:
    """Of the rollouts, iteration by iteration."""
    return [pd.read_parquet(path) for path in sorted((folder(home, "grpo") / "rollouts").glob("*.parquet"))]


def history(home: Path) -> list[dict[str, float]]:
    rows: list[dict[str, float]] = json.loads((folder(home, "grpo") / "history.json").read_text())
    return rows


def assert_whole(home: Path, *, ahead: int = 0) -> None:
    """Each prompt is there once in each step, with its group, from both servers, with the weights that were due."""
    rows, found = history(home), tables(home)
    assert [row["iteration"] for row in rows] == list(range(1, ITERATIONS + 1))
    assert len(found) == ITERATIONS
    for number, table in enumerate(found, start=1):
        assert Counter(table["prompt_id"].value_counts().tolist()) == {GROUP: PROMPTS}
        assert set(table["policy_version"]) == {max(0, number - 1 - ahead)}  # as the servers stamped each token
        assert table.groupby("prompt_id")["replica"].nunique().max() == 1
        assert Counter(table.drop_duplicates("prompt_id")["replica"].tolist()) == {0: PROMPTS // 2, 1: PROMPTS // 2}
    assert all(row["sync/max_abs"] < 1e-4 for row in rows if "sync/max_abs" in row)  # the worse of the two
    rewards = [row["reward/mean"] for row in rows]
    assert rewards[-1] > rewards[0] + 0.2, rewards


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run to which nothing happened."""
    pytest.importorskip("ray")
    return run(tmp_path_factory.mktemp("servers") / "home")


def before_rl(done: Run, home: Path) -> Path:
    shutil.copytree(done.home, home)
    shutil.rmtree(home / "cache" / "grpo")
    shutil.rmtree(home / "work", ignore_errors=True)
    return home


def test_two_servers_sample_for_ranks_on_a_cluster_which_learn_and_nothing_is_left(undisturbed: Run) -> None:
    assert undisturbed.said.count("starting vLLM") == 2
    assert_whole(undisturbed.home)
    assert all(row["mismatch/max_abs"] < 1e-4 for row in history(undisturbed.home))  # they sample from the policy
    assert len(undisturbed.left.ports) == 2
    assert len(undisturbed.left.meetings) == 2
    undisturbed.left.assert_nothing()


def test_a_server_that_is_killed_is_replaced_and_every_prompt_is_there_once(undisturbed: Run, tmp_path: Path) -> None:
    killed = set[int]()

    def kill(servers: set[int], home: Path) -> None:
        if not killed and steps(home) >= 1:
            killed.add(max(servers))
            os.kill(max(servers), signal.SIGKILL)

    done = run(before_rl(undisturbed, tmp_path / "home"), watch=kill)
    assert killed
    pairs = zip(tables(done.home), tables(undisturbed.home), strict=True)
    same = [(one["completion_ids"].map(list) == other["completion_ids"].map(list)).mean() for one, other in pairs]
    vllm_runs.say(f"shares of completions that are those of the undisturbed run: {same}")
    assert done.said.count("starting vLLM") >= 3
    assert_whole(done.home)
    assert [Counter(table["prompt_id"]) for table in tables(done.home)] == [
        Counter(table["prompt_id"]) for table in tables(undisturbed.home)
    ]
    assert len(done.left.ports) == len(done.left.meetings) >= 3
    done.left.assert_nothing()
