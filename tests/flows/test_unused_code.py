from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from rlcore.flows.presets import open_preset
from rlcore.flows.stages import stages
from rlcore.tasks.keys.cache_keys import function_of
from rlcore.tasks.store.code_hash import closure
from tests.flows.conftest import ROOT, environment
from tests.flows.micro import MICRO
from tests.flows.warm import run_warm
from tests.flows.watched import CALL

LOOKED_AT = ("grpo", "ppo", "evaluate_sft")
SMALL = (
    *(*MICRO, "evaluation.num_problems=8"),
    *(f"stages.{name}.{setting}=1" for name in ("grpo", "ppo") for setting in ("num_iterations", "eval_every")),
)


@pytest.fixture(scope="module")
def called(micro_home: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Return the modules of which each stage called a function."""
    folder = tmp_path_factory.mktemp("called")
    shutil.copytree(micro_home, folder / "home")  # it has what the stages read
    arguments = [json.dumps(SMALL), json.dumps(LOOKED_AT), str(folder / "called.json")]
    done = run_warm(arguments, environment(folder / "home"), ROOT, call=CALL)
    assert done.returncode == 0, done.stderr
    return {name: set(modules) for name, modules in json.loads((folder / "called.json").read_text()).items()}


@pytest.mark.parametrize("name", LOOKED_AT)
def test_no_function_is_called_that_the_key_of_a_stage_does_not_count(name: str, called: dict[str, set[str]]) -> None:
    config = open_preset("tiny", SMALL)
    stage = next(stage for stage in stages(config) if stage.name == name)
    module, _ = function_of(stage.run)
    left_out = closure(module) - closure(module, chosen=stage.chosen(stage.sections(config)))
    assert "rlcore.sampling.native" in called[name]
    assert sorted(called[name] & left_out) == []
