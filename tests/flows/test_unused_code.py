"""What a key leaves out of a recipe's code is not run: every call of an RL stage is looked at while it works."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from flows.presets import open_preset
from flows.stages import stages
from tasks.home.code_hash import closure
from tasks.pipeline.keys import function_of
from tests.flows.conftest import ROOT, environment
from tests.flows.micro import MICRO

SMALL = (*MICRO, "stages.grpo.num_iterations=1", "stages.grpo.eval_every=1")
RUN = """
import json, sys, threading
from flows.run import run_targets
from tasks.pipeline import stages
preset, overrides, file = "tiny", json.loads(sys.argv[1]), sys.argv[2]
run_targets(preset, overrides, ["sft"])  # so that nothing but the RL stage is run while it is looked at
called = set()
def look(frame, event, argument):
    if event == "call" and frame.f_code.co_name != "<module>":
        called.add(frame.f_globals.get("__name__", ""))
def watched(*arguments):
    threading.setprofile(look)
    sys.setprofile(look)
    try:
        return run_step(*arguments)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
run_step, stages._run_step = stages._run_step, watched  # the step alone: the pipeline plans memory, among others
run_targets(preset, overrides, ["grpo"])
json.dump(sorted(called), open(file, "w"))
"""


def test_no_function_is_called_that_the_key_of_an_rl_stage_does_not_count(micro_home: Path, tmp_path: Path) -> None:
    file = tmp_path / "called.json"
    shutil.copytree(micro_home, tmp_path / "home")
    command = [sys.executable, "-c", RUN, json.dumps(SMALL), str(file)]
    done = subprocess.run(command, cwd=ROOT, env=environment(tmp_path / "home"), capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    config = open_preset("tiny", SMALL)
    grpo = next(stage for stage in stages(config) if stage.name == "grpo")
    module, _ = function_of(grpo.run)
    left_out = closure(module) - closure(module, without=grpo.unused(grpo.sections(config)))
    called = set(json.loads(file.read_text()))
    assert "rlcore.training.learner" in called
    assert sorted(called & left_out) == []
