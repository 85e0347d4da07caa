"""A run whose learner is two processes, as a user starts it: its figures, a killed rank, a killed run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import waiting
from tests.flows.conftest import ROOT, environment, flows_command, run_flows
from tests.flows.homes import folder, weights, without

pytestmark = pytest.mark.scale

TWO = ("distributed.backend=processes", "distributed.learner_ranks=2")
SPLIT = (*TWO, "distributed.tensor_parallel=2")
BESIDE = ("distributed.backend=processes", "distributed.cpu_offload=true")  # one rank
ALONE = 'without=["stages.ppo"]'


def ranks_of() -> dict[int, int]:
    """The processes that are ranks, with their parents."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and "rlcore.distributed.rank_process" in (entry / "cmdline").read_text():
                found[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    return found


def history(home: Path, stage: str) -> list[dict[str, float]]:
    rows: list[dict[str, float]] = json.loads((folder(home, stage) / "history.json").read_text())
    return rows


@pytest.fixture(scope="module")
def undisturbed(micro_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The home of a run on two ranks to which nothing happened: SFT, a reward model, GRPO and PPO."""
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


def test_a_run_on_ranks_goes_through_and_learns_as_one_process_does(undisturbed: Path, micro_home: Path) -> None:
    assert_learns_alike(undisturbed, micro_home, "grpo", "ppo")


def assert_grpo_learns_alike(home: Path, micro_home: Path) -> None:
    ours, theirs = history(home, "grpo"), history(micro_home, "grpo")
    assert [row["policy_version"] for row in ours] == [1.0, 2.0, 3.0, 4.0]
    assert ours[0]["gradient_norm"] == pytest.approx(theirs[0]["gradient_norm"], rel=1e-2)


@pytest.mark.parametrize("placed", [SPLIT, BESIDE])
def test_grpo_learns_as_in_one_process_where_layers_are_split_or_shards_rest_beside_the_device(
    placed: tuple[str, ...], micro_home: Path, tmp_path: Path
) -> None:
    home = without(micro_home, tmp_path / "home", "grpo")
    done = run_flows("run", home, *placed, ALONE)
    assert done.returncode == 0, done.stderr
    assert_grpo_learns_alike(home, micro_home)


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


def test_a_run_that_loses_a_rank_goes_on_from_its_checkpoint(before_grpo: Path, undisturbed: Path) -> None:
    process = begin(before_grpo)
    until(process, lambda: list(before_grpo.glob("work/*/checkpoints/step-000001")))
    mine = [rank for rank, parent in ranks_of().items() if parent == process.pid]
    os.kill(mine[-1], signal.SIGKILL)
    _, said = process.communicate(timeout=waiting.LONG)
    assert process.returncode == 0, said.decode()[-3000:]
    assert "was ended by SIGKILL" in said.decode()
    assert weights(before_grpo, "grpo") == weights(undisturbed, "grpo")


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
