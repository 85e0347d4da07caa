"""``rlcore estimate``: what each stage needs beside what is there."""

from __future__ import annotations

import pytest

from rlcore.flows.cli.app import main
from rlcore.tasks.store.settings import Home


def test_each_stage_that_trains_has_its_memory_and_the_run_its_disk(
    home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["estimate", "tiny"]) == 0
    *stages, disk = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in stages] == ["sft", "reward_model", "grpo", "ppo"]
    assert [line for line in stages if " needs " not in line or " free" not in line] == []
    assert disk.startswith("disk: the run writes about ")


def test_a_model_of_which_nothing_is_here_has_no_size_yet(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    hub = f"model={{source='hub',path='org/name',revision='{'0' * 40}',license='MIT'}}"
    assert main(["estimate", "tiny", "--set", hub]) == 0
    assert capsys.readouterr().out == "memory: known when the model is there, after import_sft\n"


def test_so_many_gpus_are_dealt_between_learner_and_engines_by_arithmetic(
    home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["estimate", "tiny", "--gpus", "8", "--gpu-type", "a100"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("layout of ")]
    assert [line.split()[2] for line in lines] == ["grpo,", "ppo,"]
    assert all("by arithmetic: 8 a100: " in line and "an iteration takes" in line for line in lines)
