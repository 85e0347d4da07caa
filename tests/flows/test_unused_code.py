"""What a key leaves out of a recipe's code is not run: every call of a stage is looked at while it works."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flows.presets import open_preset
from flows.stages import stages
from tasks.home.code_hash import closure
from tasks.pipeline.keys import function_of
from tests.flows.conftest import ROOT, environment
from tests.flows.micro import MICRO

LOOKED_AT = ("grpo", "ppo", "evaluate_sft")
SMALL = (
    *(*MICRO, "evaluation.num_problems=8"),
    *(f"stages.{name}.{setting}=1" for name in ("grpo", "ppo") for setting in ("num_iterations", "eval_every")),
)
RUN = """
import json, sys, threading
from flows.run import run_targets
from tasks.pipeline import stages
preset, overrides, names, file = "tiny", json.loads(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3]
called = {name: set() for name in names}
def watched(stage, *arguments):
    def look(frame, event, argument):
        if event == "call" and frame.f_code.co_name != "<module>":
            called[stage.name].add(frame.f_globals.get("__name__", ""))
    if stage.name not in called:
        return run_step(stage, *arguments)
    threading.setprofile(look)
    sys.setprofile(look)
    try:
        return run_step(stage, *arguments)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
run_step, stages._run_step = stages._run_step, watched  # the step alone: the pipeline plans memory, among others
run_targets(preset, overrides, names)
json.dump({name: sorted(modules) for name, modules in called.items()}, open(file, "w"))
"""


@pytest.fixture(scope="module")
def called(micro_home: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Of each stage, the modules of which it called a function."""
    folder = tmp_path_factory.mktemp("called")
    shutil.copytree(micro_home, folder / "home")  # it has what the stages read
    arguments = [json.dumps(SMALL), json.dumps(LOOKED_AT), str(folder / "called.json")]
    command = [sys.executable, "-c", RUN, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment(folder / "home"), capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return {name: set(modules) for name, modules in json.loads((folder / "called.json").read_text()).items()}


@pytest.mark.parametrize("name", LOOKED_AT)
def test_no_function_is_called_that_the_key_of_a_stage_does_not_count(name: str, called: dict[str, set[str]]) -> None:
    config = open_preset("tiny", SMALL)
    stage = next(stage for stage in stages(config) if stage.name == name)
    module, _ = function_of(stage.run)
    left_out = closure(module) - closure(module, without=stage.unused(stage.sections(config)))
    assert "rlcore.sampling.native" in called[name]
    assert sorted(called[name] & left_out) == []
