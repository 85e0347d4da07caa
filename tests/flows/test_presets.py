"""Presets: every committed one is whole; a fault is refused with its path before anything runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rlcore.errors import ConfigError
from rlcore.flows.presets import FOLDER, open_preset
from rlcore.flows.stages import stages
from rlcore.tasks.keys.plan import order_stages
from tests.flows.micro import PRESETS


@pytest.mark.parametrize("name", PRESETS)
def test_every_committed_preset_is_valid_and_its_stages_form_an_order(name: str) -> None:
    config = open_preset(name)
    table = stages(config)
    ordered = [stage.name for stage in order_stages(table, [stage.name for stage in table])]
    assert config.name == name
    assert ordered[0] == "import_sft"
    assert ordered[-1] == "compare"
    assert all(ordered.index(i) < ordered.index(s.name) for s in table for i in s.inputs)


def test_an_override_changes_one_value() -> None:
    assert open_preset("tiny", ["stages.grpo.learning_rate=2e-6"]).stages["grpo"].settings.learning_rate == 2e-6


def test_a_preset_may_be_a_file_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text((FOLDER / "tiny.toml").read_text().replace('name = "tiny"', 'name = "mine"'))
    assert open_preset(str(path)).name == "mine"


def test_a_preset_anywhere_may_extend_a_committed_one(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('extends = "tiny"\nname = "mine"\n[stages.grpo]\nlearning_rate = 2e-6\n')
    mine, tiny = open_preset(str(path)), open_preset("tiny")
    assert (mine.name, mine.stages["grpo"].settings.learning_rate) == ("mine", 2e-6)
    assert (mine.stages["sft"], mine.stages["ppo"]) == (tiny.stages["sft"], tiny.stages["ppo"])


def test_an_unknown_preset_is_refused_and_the_known_ones_are_named() -> None:
    with pytest.raises(ConfigError, match="tiny"):
        open_preset("tinny")


@pytest.mark.parametrize(
    ("override", "path"),
    [
        ("stages.grpo.lerning_rate=1e-6", "stages.grpo.lerning_rate"),
        ("stages.grpo.learning_rate='fast'", "stages.grpo.learning_rate"),
        ("stages.grpo.learning_rate=-1.0", "stages.grpo.learning_rate"),
        ("stages.ppo.rewards.0.weigth=1.0", "stages.ppo.rewards.0.weigth"),
        ("model.source='ftp'", "model.source"),
        ("promotion={challenger='grpo',approval='none'}", "promotion.approval"),
    ],
)
def test_the_command_line_refuses_a_fault_with_its_path_and_does_nothing(
    override: str, path: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "rlcore.flows", "run", "--preset", "tiny", "--set", override]
    environment = {"RLCORE_HOME": str(tmp_path / "home"), "PATH": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=FOLDER.parents[1], check=False)
    assert done.returncode == 2
    assert path in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "home").exists()
