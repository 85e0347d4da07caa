"""The emulated processors are what they are said to be, in processes of tests and in those that tests start."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.machines.run import main, what_computes
from tests.machines.table import MACHINES, ROOT, environment_of

ASKED = """
import json, os, subprocess, sys, torch
units = [torch.cpu._is_avx512_bf16_supported(), torch.cpu._is_amx_tile_supported(), torch.cpu._is_amx_fp16_supported()]
print(json.dumps([torch.backends.cpu.get_cpu_capability(), units]), flush=True)
if "child" in sys.argv:
    sys.exit(subprocess.run([sys.executable, "-c", os.environ["ASKED"]]).returncode)
"""
HIGHEST = {"avx2": "AVX2", "default": "DEFAULT"}
ORDER = ["DEFAULT", "AVX2", "AVX512"]


FAST = ("pretended", "default")


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=() if each in FAST else pytest.mark.slow) for each in MACHINES]
)
def test_a_process_and_its_child_see_the_emulated_processor(name: str) -> None:
    environment = environment_of(MACHINES[name]) | {"ASKED": ASKED}
    command = [sys.executable, "-c", ASKED, "child"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
    own, child = (json.loads(line) for line in done.stdout.splitlines())
    assert own == child
    assert own[1] == [name == "pretended"] * 3
    if name in HIGHEST and own[0] in ORDER:  # other families of processors have names of their own
        assert ORDER.index(own[0]) <= ORDER.index(HIGHEST[name])


def test_the_library_says_which_machine_it_is_taken_for() -> None:
    assert "instructions='DEFAULT'" in what_computes(MACHINES["default"])


def test_a_machine_that_is_not_in_the_table_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["vax"]) == 2
    assert "there are hidden, pretended, avx2, default" in capsys.readouterr().out
