"""Runs whose learner is on several processes or on a Ray cluster: their figures, a killed process, a killed run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tests import waiting
from tests.flows.conftest import ROOT, environment, flows_command, run_flows
from tests.flows.homes import folder, weights, without
from tests.flows.micro import MICRO

TWO = ("distributed.backend=processes", "distributed.learner_ranks=2")
SPLIT = (*TWO, "distributed.tensor_parallel=2")
BESIDE = ("distributed.backend=processes", "distributed.cpu_offload=true")  # one rank
ALONE = 'without=["stages.ppo"]'


def ranks_of() -> dict[int, int]:
    """The processes that are ranks, with their parents."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and "rlcore.distributed.rank\0" in (entry / "cmdline").read_text():
                found[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    return found


def history(home: Path, stage: str) -> list[dict[str, float]]:
    rows: list[dict[str, float]] = json.loads((folder(home, stage) / "history.json").read_text())
    return rows


@pytest.fixture(scope="module")
def undisturbed(micro_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    learned = ("sft", "reward_model", "grpo", "ppo")
    home = without(micro_home, tmp_path_factory.mktemp("placed") / "home", *learned)
    done = run_flows("run", home, *TWO)
    assert done.returncode == 0, done.stderr
    return home


@pytest.fixture
def before_grpo(undisturbed: Path, tmp_path: Path) -> Path:
    return without(undisturbed, tmp_path / "home", "grpo")


def begin(home: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        flows_command("run", *TWO, ALONE),
        env=environment(home),
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def until(process: subprocess.Popen[bytes], is_so: Callable[[], Any]) -> None:
    waiting.until(lambda: is_so() or process.poll() is not None, "it")
    assert process.poll() is None, process.communicate()[1].decode()[-3000:]


def assert_learns_alike(home: Path, micro_home: Path, *learned: str) -> None:
    """Supervised losses are those of one process but for rounding; on which draws of RL may turn."""
    for stage, name in (("sft", "sft/loss"), ("reward_model", "rm/loss")):
        ours, theirs = ([row[name] for row in history(each, stage)] for each in (micro_home, home))
        assert len(ours) == len(theirs)
        assert theirs[:5] == pytest.approx(ours[:5], rel=1e-2), stage
    for stage in learned:
        assert [row["policy_version"] for row in history(home, stage)] == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.scale
def test_a_run_on_ranks_goes_through_and_learns_as_one_process_does(undisturbed: Path, micro_home: Path) -> None:
    assert_learns_alike(undisturbed, micro_home, "grpo", "ppo")


def assert_grpo_learns_alike(home: Path, micro_home: Path) -> None:
    ours, theirs = history(home, "grpo"), history(micro_home, "grpo")
    assert [row["policy_version"] for row in ours] == [1.0, 2.0, 3.0, 4.0]
    assert ours[0]["gradient_norm"] == pytest.approx(theirs[0]["gradient_norm"], rel=1e-2)


@pytest.mark.scale
@pytest.mark.parametrize("placed", [SPLIT, BESIDE])
def test_grpo_learns_as_in_one_process_where_layers_are_split_or_shards_rest_beside_the_device(
    placed: tuple[str, ...], micro_home: Path, tmp_path: Path
) -> None:
    home = without(micro_home, tmp_path / "home", "grpo")
    done = run_flows("run", home, *placed, ALONE)
    assert done.returncode == 0, done.stderr
    assert_grpo_learns_alike(home, micro_home)


@pytest.mark.scale
def test_adapters_learn_on_two_ranks_that_each_have_the_base(undisturbed: Path, tmp_path: Path) -> None:
    home = without(undisturbed, tmp_path / "home", "grpo", "ppo")
    adapters = (
        "stages.grpo.update.lora.rank=4",
        "stages.ppo.update.lora.rank=4",
        "stages.ppo.critic.architecture=lora",
    )
    done = run_flows("run", home, *TWO, *adapters)
    assert done.returncode == 0, done.stderr
    for stage in ("grpo", "ppo"):
        assert (folder(home, stage) / "model" / "adapter" / "adapter_model.safetensors").is_file()
        assert history(home, stage)[-1]["policy_version"] == 4.0


@pytest.mark.scale
def test_a_run_that_loses_a_rank_goes_on_from_its_checkpoint(before_grpo: Path, undisturbed: Path) -> None:
    process = begin(before_grpo)
    until(process, lambda: list(before_grpo.glob("work/*/checkpoints/step-000001")))
    mine = [rank for rank, parent in ranks_of().items() if parent == process.pid]
    os.kill(mine[-1], signal.SIGKILL)
    _, output = process.communicate(timeout=waiting.LONG)
    assert process.returncode == 0, output.decode()[-3000:]
    assert "was ended by SIGKILL" in output.decode()
    assert weights(before_grpo, "grpo") == weights(undisturbed, "grpo")


@pytest.mark.scale
def test_ranks_end_with_a_run_that_is_killed_and_it_goes_on_when_it_is_started_again(
    before_grpo: Path, undisturbed: Path
) -> None:
    process = begin(before_grpo)
    until(process, lambda: list(before_grpo.glob("work/*/checkpoints/step-000002")))
    mine = {rank for rank, parent in ranks_of().items() if parent == process.pid}
    assert len(mine) == 2
    process.kill()
    process.communicate()
    waiting.until(lambda: not mine & ranks_of().keys(), "the end of the run's ranks")
    done = run_flows("run", before_grpo, *TWO, ALONE)
    assert done.returncode == 0, done.stderr
    assert "resume: after iteration" in done.stderr
    assert weights(before_grpo, "grpo") == weights(undisturbed, "grpo")


ON_RAY = (
    "distributed.backend=ray",
    "distributed.learner_ranks=2",
    "distributed.ray.num_rollout_workers=2",
    "distributed.ray.num_reward_workers=1",
)
ITERATIONS = 6
RUN_AHEAD = ("stages.grpo.sampling.staleness=1", f"stages.grpo.num_iterations={ITERATIONS}")
SECONDS = 3600.0
NICENESS = {"RAY_worker_niceness": "0"}  # 15 otherwise: of a machine that has other work they would get nothing


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    ray = pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in NICENESS.items():
            patch.setenv(name, value)
        found = ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False)
        yield str(found.address_info["gcs_address"])
        ray.shutdown()


@pytest.fixture(scope="module")
def on_cluster(micro_home: Path, tmp_path_factory: pytest.TempPathFactory, address: str) -> Path:
    home = without(micro_home, tmp_path_factory.mktemp("placed") / "home", "sft", "reward_model", "grpo", "ppo")
    end(begin_on_ray(home, address, "ppo"))
    return home


@pytest.fixture(scope="module")
def ahead(on_cluster: Path, tmp_path_factory: pytest.TempPathFactory, address: str) -> Path:
    """That home after a run of GRPO with rollouts one iteration ahead, to which nothing happened either."""
    home = without(on_cluster, tmp_path_factory.mktemp("ahead") / "home")
    end(begin_on_ray(home, address, "grpo", *RUN_AHEAD))
    return home


def begin_on_ray(home: Path, address: str, target: str, *settings: str) -> subprocess.Popen[bytes]:
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
    _, output = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, output.decode()[-3000:]
    return output.decode()


def descendants(parent: int) -> dict[int, str]:
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


def tables(home: Path, stage: str) -> list[Path]:
    return sorted((folder(home, stage) / "rollouts").glob("*.parquet"))


def prompts_of(home: Path, stage: str) -> list[Counter[str]]:
    return [Counter(pd.read_parquet(path)["prompt_id"]) for path in tables(home, stage)]


def until_step(process: subprocess.Popen[bytes], home: Path, step: int) -> None:
    def has_one() -> bool:
        found = home.glob("work/*/checkpoints/step-??????")
        return process.poll() is not None or any(int(path.name[5:]) >= step for path in found)

    waiting.until(has_one, f"no checkpoint {step}")
    assert process.poll() is None, process.communicate()[1].decode()[-3000:]


def kill_one(process: subprocess.Popen[bytes], kind: str) -> None:
    before = actors(kind)
    os.kill(max(before), signal.SIGKILL)
    waiting.until(lambda: process.poll() is not None or len(actors(kind) - before) > 0, f"no {kind} in its place")
    assert process.poll() is None, process.communicate()[1].decode()[-3000:]


@pytest.mark.scale
@pytest.mark.filterwarnings("default")  # Ray's own are not ours to mend
def test_a_run_on_a_cluster_goes_through_and_learns_as_one_process_does(on_cluster: Path, micro_home: Path) -> None:
    assert_learns_alike(on_cluster, micro_home, "ppo")  # with a reward model, on a scorer
    assert prompts_of(on_cluster, "ppo") == prompts_of(micro_home, "ppo")
    assert all(len(each) == 4 and set(each.values()) == {2} for each in prompts_of(on_cluster, "ppo"))
    waiting.until(lambda: not actors(), "a process outlives its run")


@pytest.mark.scale
@pytest.mark.filterwarnings("default")  # Ray's own are not ours to mend
def test_each_token_is_one_update_old_and_kills_change_neither_prompts_nor_weights(
    ahead: Path, tmp_path: Path, address: str
) -> None:
    home = without(ahead, tmp_path / "home", "grpo")
    process = begin_on_ray(home, address, "grpo", *RUN_AHEAD)
    until_step(process, home, 1)
    kill_one(process, "Sampler")
    until_step(process, home, 2)
    kill_one(process, "Rank")
    until_step(process, home, 4)
    process.kill()
    output = " ".join(process.communicate()[1].decode().split())
    assert "was replaced: reload policy_version" in output
    assert "is gone (The actor is dead because its worker process has died" in output
    waiting.until(lambda: not actors(), "a process outlives its run")
    assert not list((home / "cache" / "grpo").glob("*.json"))
    assert "resume: after iteration" in end(begin_on_ray(home, address, "grpo", *RUN_AHEAD))

    rows = json.loads((folder(home, "grpo") / "history.json").read_text())
    assert [row["iteration"] for row in rows] == list(range(1, ITERATIONS + 1))
    assert [row["staleness"] for row in rows] == [0.0] + [1.0] * (ITERATIONS - 1)
    for number, path in enumerate(tables(home, "grpo"), start=1):  # a completion has the version of its oldest token
        assert set(pd.read_parquet(path)["policy_version"]) == {max(0, number - 2)}
    assert prompts_of(home, "grpo") == prompts_of(ahead, "grpo")
    assert all(len(each) == 4 and set(each.values()) == {4} for each in prompts_of(home, "grpo"))
    assert [path.read_bytes() for path in tables(home, "grpo")] == [path.read_bytes() for path in tables(ahead, "grpo")]
    assert weights(home, "grpo") == weights(ahead, "grpo")
    waiting.until(lambda: not actors(), "a process outlives its run")
