"""`prefect deployment run online-rl/grpo` with two ranks on a Ray cluster and two real vLLM servers beside them.

Whole, and with one of the servers killed. `make test-engine` runs it; the interpreter of the engine's environment
is in ENGINE_PYTHON.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tests.flows.homes import folder
from tests.flows.micro import MICRO
from tests.flows.test_placement import NICENESS, descendants
from tests.integration import vllm_runs
from tests.integration.service_runs import Services
from tests.integration.test_services import services
from tests.waiting import until

pytestmark = [
    pytest.mark.scale,
    pytest.mark.engine,
    pytest.mark.skipif(not vllm_runs.PYTHON, reason="ENGINE_PYTHON names no interpreter: `make test-engine`"),
]

__all__ = ["services"]  # a fixture

ENDED = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}
ITERATIONS, PROMPTS, GROUP = 5, 8, 4
PLACED = (
    "distributed.backend=ray",
    "distributed.learner_ranks=2",
    "stages.grpo.sampling.engine.kind=vllm",
    f"stages.grpo.sampling.engine.python={vllm_runs.PYTHON}",
    "stages.grpo.sampling.engine.replicas=2",
    "stages.grpo.sampling.engine.kv_cache_gib=0.25",
)
# The share of even token ids: a policy learns that within a few iterations, whatever it knew.
LEARNABLE = (
    "hardware.dtype=float32",
    "stages.grpo.rewards=[{kind='tests.rlcore.distributed.cluster.scoring:even',weight=1.0}]",
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
    """Possible leftovers of a run outside of its home: processes, shared memory, folders, ports."""

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
    """Log, results and possible leftovers of a deployment's run."""

    said: str
    history: list[dict[str, float]]
    tables: list[pd.DataFrame]
    left: Left


@pytest.fixture(scope="module", autouse=True)
def as_nice_as_others() -> Iterator[None]:
    """Ray's processes and vLLM's threads on a machine that has other work; services are started after this."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (NICENESS | {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}).items():
            patch.setenv(name, value)
        patch.delenv("RAY_ADDRESS", raising=False)  # each run has a cluster of its own
        yield


def run(services: Services, *, watch: Callable[[set[int], int], Any] = lambda servers, step: None) -> Run:
    """A run until its end; ``watch`` is shown its servers and its newest checkpoint all the time, and may kill one."""
    home = services.home
    left, before = Left(home), set(checkpoints(home))
    identifier = services.submit("online-rl/grpo", *MICRO, *PLACED, *LEARNABLE, preset="tiny")
    while (state := services.flow_run(identifier)["state_type"]) not in ENDED:
        watch(left.note(services.number("worker")), newest(set(checkpoints(home)) - before))
        time.sleep(0.5)
    said = services.logged(identifier)
    vllm_runs.say(said[-6000:])
    assert state == "COMPLETED"
    made = folder(home, "grpo")
    rows: list[dict[str, float]] = json.loads((made / "history.json").read_text())
    return Run(said, rows, [pd.read_parquet(path) for path in sorted((made / "rollouts").glob("*.parquet"))], left)


def checkpoints(home: Path) -> list[Path]:
    return [*home.glob("work/*/checkpoints/step-??????")]


def newest(found: Collection[Path]) -> int:
    return max((int(path.name.removeprefix("step-")) for path in found), default=0)


def assert_whole(done: Run) -> None:
    """Each prompt is there once in each step, with its group, from both servers, with the weights that were due."""
    assert [row["iteration"] for row in done.history] == list(range(1, ITERATIONS + 1))
    assert len(done.tables) == ITERATIONS
    for number, table in enumerate(done.tables, start=1):
        assert Counter(table["prompt_id"].value_counts().tolist()) == {GROUP: PROMPTS}
        assert set(table["policy_version"]) == {number - 1}  # as the servers stamped each token
        assert table.groupby("prompt_id")["replica"].nunique().max() == 1
        assert Counter(table.drop_duplicates("prompt_id")["replica"].tolist()) == {0: PROMPTS // 2, 1: PROMPTS // 2}
    assert all(
        row["sync/logprob_max_diff"] < 1e-4 for row in done.history if "sync/logprob_max_diff" in row
    )  # the worse of the two
    rewards = [row["reward/mean"] for row in done.history]
    assert rewards[-1] > rewards[0] + 0.2, rewards


@pytest.fixture(scope="module")
def undisturbed(services: Services) -> Run:
    pytest.importorskip("ray")
    return run(services)


def test_two_servers_sample_for_ranks_on_a_cluster_which_learn_and_nothing_is_left(
    services: Services, undisturbed: Run
) -> None:
    assert undisturbed.said.count("starting vLLM") == 2
    assert_whole(undisturbed)
    assert all(row["mismatch/max_abs"] < 1e-4 for row in undisturbed.history)  # they sample from the policy
    assert sorted(services.steps(services.record("grpo")["ref"]["mlflow_run_id"])) == list(range(1, ITERATIONS + 1))
    assert len(undisturbed.left.ports) == 2
    assert len(undisturbed.left.meetings) == 2
    undisturbed.left.assert_nothing()


def test_a_server_that_is_killed_is_replaced_and_every_prompt_is_there_once(
    services: Services, undisturbed: Run
) -> None:
    killed = set[int]()

    def kill(servers: set[int], step: int) -> None:
        if not killed and servers and step >= 1:
            killed.add(max(servers))
            os.kill(max(servers), signal.SIGKILL)

    services.forget("grpo")
    done = run(services, watch=kill)
    assert killed
    pairs = zip(done.tables, undisturbed.tables, strict=True)
    same = [(one["completion_ids"].map(list) == other["completion_ids"].map(list)).mean() for one, other in pairs]
    vllm_runs.say(f"shares of completions that are those of the undisturbed run: {same}")
    assert done.said.count("starting vLLM") >= 3
    assert_whole(done)
    assert [Counter(table["prompt_id"]) for table in done.tables] == [
        Counter(table["prompt_id"]) for table in undisturbed.tables
    ]
    assert len(done.left.ports) == len(done.left.meetings) >= 3
    done.left.assert_nothing()
